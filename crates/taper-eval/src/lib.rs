//! Long-context tasks over any pair of attention methods: what a method costs in answers, beside what it reads.
//!
//! The tasks are those of RULER (Hsieh et al. 2024, arXiv:2404.06654) with its wording, from generators of our own;
//! [`run`] prefills each prompt once per prefill method and decodes it with every decode method from there. Knows the
//! engine's backend, no HTTP and no terminal. [`heads()`] measures a method's error and promise head by head,
//! [`speed()`] its time, [`steps`] that of a model's whole step. [`train`] makes what some methods learn offline.

mod error;
mod fit;
mod heads;
mod method;
mod prose;
mod results;
mod run;
mod score;
mod speed;
mod step;
mod table;
mod tasks;
mod text;
pub mod train;
mod words;

pub use candle_core::DType;
pub use error::EvalError;
pub use heads::{Estimate, HeadsPlan, HeadsRow, Place, Promised, heads, heads_table, with_promises};
pub use method::{Method, Phase};
pub use results::{Cell, Header, Record, Results, digests};
pub use run::{Fork, Outcome, Plan, Watch, run, write_prompts};
pub use speed::{SpeedPlan, Timed, speed, speed_table};
pub use step::{StepPlan, StepRow, step_caption, step_table, steps};
pub use table::{Style, accuracies, details};
pub use tasks::{Sample, Task};
pub use text::{ModelText, PromptText};
