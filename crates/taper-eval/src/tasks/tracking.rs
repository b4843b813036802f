//! Variable tracking: RULER's `vt`, one chain of five variables.

use super::Draft;
use super::needles::{NOISE, insert};
use crate::words::letters;
use rand::Rng;
use rand_chacha::ChaCha8Rng;

/// Assignments after the first.
const HOPS: usize = 4;

/// The question over `units` lines of noise. More units keep the chain as it is.
pub fn draft(units: usize, mut rng: ChaCha8Rng) -> Draft {
    let mut variables: Vec<String> = Vec::new();
    while variables.len() <= HOPS {
        let name = letters(&mut rng, b'A', 5);
        if !variables.contains(&name) {
            variables.push(name);
        }
    }
    let value: u32 = rng.random_range(10_000..100_000);
    let mut chain = vec![format!("VAR {} = {value}", variables[0])];
    chain.extend(variables.windows(2).map(|pair| format!("VAR {} = VAR {} ", pair[1], pair[0])));
    let mut depths: Vec<f64> = chain.iter().map(|_| rng.random()).collect();
    depths.sort_by(f64::total_cmp);
    // Line ends belong to the noise alone, and lines are joined by spaces: RULER's layout, kept to the letter.
    let lines = insert(vec![format!("{NOISE}\n"); units], &chain, &depths);
    let context = lines.join(" ").replace(". \n", ".\n");
    Draft {
        context: format!(
            "Memorize and track the chain(s) of variable assignment hidden in the following text.\n\n{context}"
        ),
        question: format!("\nQuestion: Find all variables that are assigned the value {value} in the text above."),
        prefix: format!(
            " Answer: According to the chain(s) of variable assignment in the text above, {} variables are assigned \
             the value {value}, they are: ",
            HOPS + 1
        ),
        wanted: variables,
    }
}
