//! Drafts that keep to what the first of their round chose.

use super::properties::all_typical;
use super::*;
use crate::method::{Choice, DecodeMethod, DecodeStep, KeyIndex, Rotations};
use crate::speculate::{Choose, Speculate};
use proptest::prelude::*;
use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};
use taper_kernels::decode::{Decode, DecodeRow, HeadSelection, Keys, Selection, attend};
use taper_kernels::index::Part;
use taper_kernels::kv::{BLOCK_TOKENS, PagedKv};
use taper_kv_cache::IndexShape;

/// Reads the first token that a row sees, one in the middle, and the last eight. Counts how often it is asked, and how often
/// its index grows.
#[derive(Debug, Default)]
struct Stub {
    calls: AtomicUsize,
    index: Counted,
}

#[derive(Debug, Default)]
struct Counted(AtomicUsize);

impl Stub {
    fn reads(visible: &Range<usize>) -> Keys {
        let Range { start, end } = *visible;
        let ids = vec![start as u32, (start + (end - start) / 2) as u32];
        Keys { ranges: std::iter::once(end - 8..end).collect(), ids, sample: None }
    }

    /// Times that it chose, and that its index took keys in.
    fn asked(&self) -> (usize, usize) {
        (self.calls.load(Ordering::SeqCst), self.index.0.load(Ordering::SeqCst))
    }
}

impl DecodeMethod for Stub {
    fn select(&self, step: &DecodeStep) -> candle_core::Result<Choice> {
        self.calls.fetch_add(1, Ordering::SeqCst);
        let heads = step.per_head(|row| HeadSelection::Keys(Self::reads(&row.visible)));
        Ok(Selection::from(heads).into())
    }

    fn indices(&self) -> Vec<&dyn KeyIndex> {
        vec![&self.index]
    }
}

impl KeyIndex for Counted {
    fn name(&self) -> String {
        "counted".to_owned()
    }

    fn shape(&self, _: &AttentionShape, _: DType) -> IndexShape {
        IndexShape { rows: BLOCK_TOKENS, width: 1, dtype: DType::F32 }
    }

    fn extend(&self, _: usize, _: &Tensor, _: PagedKv, _: &[Part], _: &Rotations) -> candle_core::Result<()> {
        self.0.fetch_add(1, Ordering::SeqCst);
        Ok(())
    }
}

const PROMPT: usize = 300;

/// A pool for sequences whose inputs are fixed.
struct Drafting {
    shape: AttentionShape,
    pool: KvPool,
    inputs: [Tensor; 3],
}

impl Drafting {
    fn new(layers: usize, window: Option<usize>) -> Self {
        let shape = AttentionShape { layers, ..shape(3, 64, window) };
        let kv = KvShape { layers, kv_heads: shape.kv_heads, head_dim: shape.head_dim };
        let heads = [shape.q_heads, shape.kv_heads, shape.kv_heads];
        Self {
            shape,
            pool: KvPool::new(kv, DType::F32, 40, &Device::Cpu).unwrap(),
            inputs: heads.map(|heads| random((2 * PROMPT, heads, shape.head_dim), heads as u64 + 21)),
        }
    }

    /// One step of some sequences, so many tokens of each: the outputs of all layers, sequence by sequence. Unless `whole` it
    /// ends, as one that fails, behind the first layer.
    fn step(&mut self, sequences: &mut [&mut Sequence], tokens: usize, whole: bool) -> Vec<Vec<f32>> {
        let starts: Vec<usize> = sequences.iter().map(|sequence| sequence.len()).collect();
        let spans = sequences.iter_mut().map(|sequence| Span { sequence, tokens }).collect();
        let rotary = PlainRotary(self.shape.head_dim);
        let mut batch = AttentionBatch::new(self.shape, &rotary, &mut self.pool, spans).unwrap();
        let part = |t: &Tensor| {
            let rows: Vec<Tensor> = starts.iter().map(|&start| t.narrow(0, start, tokens).unwrap()).collect();
            Tensor::cat(&rows, 0).unwrap()
        };
        let [q, k, v] = [0, 1, 2].map(|i| part(&self.inputs[i]));
        let mut outs = vec![Vec::new(); starts.len()];
        for layer in 0..if whole { self.shape.layers } else { 1 } {
            // Another layer has other queries.
            let q = (&q * (1.0 + layer as f64)).unwrap();
            let out = batch.attend(layer, &q, &k, &v).unwrap().flatten_all().unwrap().to_vec1::<f32>().unwrap();
            let each = out.len() / outs.len();
            outs.iter_mut().zip(out.chunks(each)).for_each(|(all, own)| all.extend(own));
        }
        if whole {
            batch.finish().unwrap();
        }
        outs
    }

    fn one(&mut self, sequence: &mut Sequence) -> Vec<f32> {
        self.step(&mut [sequence], 1, true).remove(0)
    }

    /// What the stub's draft that has just come in should have given, if it read the keys that a row chose which saw tokens up to
    /// `seen`, and all since; and how many that are.
    fn expected(&self, sequence: &Sequence, seen: usize) -> (Vec<f32>, usize) {
        let see = |end: usize| end.saturating_sub(self.shape.window.unwrap_or(end))..end;
        let (end, visible) = (sequence.len(), see(sequence.len()));
        let Keys { ranges, ids, .. } = Stub::reads(&see(seen));
        let chosen = ids.into_iter().chain(ranges.into_iter().flatten().map(|token| token as u32));
        let mut ids: Vec<u32> = chosen.chain(seen as u32..end as u32).collect();
        ids.retain(|&id| visible.contains(&(id as usize)));
        ids.sort_unstable();
        let count = ids.len();
        let heads = vec![HeadSelection::Keys(Keys { ids, ..Keys::default() }); self.shape.kv_heads];
        let (selection, row) = (heads.into(), DecodeRow { table: sequence.table.blocks(), visible });
        let of = |layer: usize| {
            let q = (self.inputs[0].narrow(0, end - 1, 1).unwrap() * (1.0 + layer as f64)).unwrap();
            let batch = Decode { q: &q, kv: self.pool.layer(layer), rows: std::slice::from_ref(&row) };
            attend(&batch, &selection, None).unwrap().flatten_all().unwrap().to_vec1::<f32>().unwrap()
        };
        ((0..self.shape.layers).flat_map(of).collect(), count)
    }

    /// The check of a round that began with `start` tokens: so many drafts, of which `right` stay.
    fn check(&mut self, sequence: &mut Sequence, start: usize, (drafts, right): (usize, usize)) {
        sequence.truncate(&mut self.pool, start).unwrap();
        sequence.draft(false);
        self.step(&mut [sequence], drafts + 1, true);
        sequence.truncate(&mut self.pool, start + right + 1).unwrap();
    }

    /// A sequence whose prompt is in, and whose drafts come by the method given.
    fn sequence(&mut self, method: Arc<dyn DecodeMethod>, choose: Choose) -> Sequence {
        let method = Chosen { name: "stub", json: json!({ "method": "stub" }), method };
        let speculate = Some(Speculate { method: Some(method), tokens: 4, choose, lookup: 0 });
        self.prompted(AttentionSpec { speculate, ..AttentionSpec::default() })
    }

    /// One by a spec of the registry's methods.
    fn by(&mut self, spec: &Value) -> Sequence {
        let artifacts = random_artifacts(self.shape);
        self.prompted(AttentionSpec::from_json(spec, "attention", &artifacts).unwrap())
    }

    fn prompted(&mut self, spec: AttentionSpec) -> Sequence {
        let mut sequence = Sequence::new(Arc::new(spec), 5, PROMPT);
        self.step(&mut [&mut sequence], PROMPT, true);
        sequence
    }
}

/// Whether anything is held for the next draft.
fn holds(sequence: &Sequence) -> bool {
    sequence.round.held(0, sequence.len()).is_some()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]
    #[test]
    fn a_round_reads_what_its_first_draft_chose_and_all_since(
        window in prop_oneof![Just(None), (12usize..400).prop_map(Some)],
        rounds in prop::collection::vec((1usize..9, any::<prop::sample::Index>()), 1..4),
    ) {
        let mut drafting = Drafting::new(2, window);
        let stub = Arc::new(Stub::default());
        let mut sequence = drafting.sequence(stub.clone(), Choose::Round);
        let (mut keys, mut drafted) = (0, 0);
        for (round, (drafts, right)) in rounds.iter().enumerate() {
            let start = sequence.len();
            sequence.draft(true);
            for _ in 0..*drafts {
                let out = drafting.one(&mut sequence);
                let (expected, count) = drafting.expected(&sequence, start + 1);
                prop_assert!(relative(&out, &expected) < 1e-5);
                (keys, drafted) = (keys + count, drafted + 1);
                // Once a layer and round.
                prop_assert_eq!(stub.asked(), (2 * (round + 1), 2 * (round + 1)));
            }
            drafting.check(&mut sequence, start, (*drafts, right.index(drafts + 1)));
            prop_assert!(!holds(&sequence));
        }
        let report = sequence.usage().speculation.unwrap().draft.unwrap();
        prop_assert!((report.budget_mean - keys as f64 / drafted as f64).abs() < 1e-9, "{:?}", report);
        drafting.pool.check_integrity([sequence.table()]);
    }
}

#[test]
fn drafts_that_choose_every_time_hold_nothing() {
    let mut drafting = Drafting::new(2, None);
    let stub = Arc::new(Stub::default());
    let mut sequence = drafting.sequence(stub.clone(), Choose::Token);
    sequence.draft(true);
    for drafts in 1..5 {
        let out = drafting.one(&mut sequence);
        assert!(relative(&out, &drafting.expected(&sequence, sequence.len()).0) < 1e-5);
        assert_eq!((stub.asked(), holds(&sequence)), ((2 * drafts, 2 * drafts), false));
    }
}

#[test]
fn a_draft_that_fails_chooses_again_and_others_keep_to_their_choice() {
    let mut drafting = Drafting::new(2, None);
    let stub = Arc::new(Stub::default());
    let mut sequence = drafting.sequence(stub.clone(), Choose::Round);
    sequence.draft(true);
    drafting.step(&mut [&mut sequence], 1, false);
    assert!(!holds(&sequence), "of a step that has not been");
    for calls in [3, 3, 3] {
        drafting.one(&mut sequence);
        drafting.step(&mut [&mut sequence], 1, false);
        assert_eq!(stub.asked().0, calls);
        assert!(holds(&sequence));
    }
}

#[test]
fn what_is_held_ends_with_its_round_and_its_sequence() {
    let mut drafting = Drafting::new(2, None);
    let start = |drafting: &mut Drafting| {
        let mut sequence = drafting.sequence(Arc::new(Stub::default()), Choose::Round);
        sequence.draft(true);
        (0..2).for_each(|_| drop(drafting.one(&mut sequence)));
        assert!(holds(&sequence));
        sequence
    };
    let sequence = start(&mut drafting);
    let fork = sequence.fork(&mut drafting.pool, 6).unwrap();
    assert!(holds(&sequence) && !holds(&fork));
    let mut other = Drafting::new(2, None);
    let moved = sequence.move_to(&drafting.pool, &mut other.pool, 6).unwrap();
    assert!(!holds(&moved));
    let ends: [fn(&mut Sequence, &mut KvPool); 3] = [
        |sequence, _| sequence.draft(false),
        |sequence, pool| sequence.truncate(pool, PROMPT + 1).unwrap(),
        |sequence, pool| sequence.retract(pool),
    ];
    for end in ends {
        let mut sequence = start(&mut drafting);
        end(&mut sequence, &mut drafting.pool);
        assert!(sequence.round.held(0, usize::MAX).is_none());
        drafting.pool.release(sequence.table_mut());
    }
}

/// Drafts of a round by a method: what they gave, and what they came to.
fn drafts(method: &Value, choose: &str, count: usize) -> (Vec<Vec<f32>>, Value) {
    let mut drafting = Drafting::new(1, None);
    let mut sequence = drafting.by(&json!({ "speculate": { "method": method, "choose": choose } }));
    sequence.draft(true);
    let outs = (0..count).map(|_| drafting.one(&mut sequence)).collect();
    (outs, json!(sequence.usage().speculation.unwrap().draft))
}

#[test]
fn every_method_drafts_by_rounds() {
    for method in all_typical() {
        let ((by_round, usage), (by_token, each)) = (drafts(&method, "round", 4), drafts(&method, "token", 4));
        assert_eq!(by_round[0], by_token[0], "{method}: the first chooses");
        assert!(by_round.iter().flatten().all(|x| x.is_finite()), "{method}");
        // Values that are weighed for one query are no other's, and nothing is spent on choosing a window.
        let name = method["method"].as_str().unwrap();
        let afresh = ["dense", "streaming_llm", "santa"].contains(&name);
        let all = usage["density"] == 1.0;
        assert_eq!(by_round == by_token, afresh || all, "{method}: {usage}");
        let scored = |usage: &Value| usage["scored"].as_f64();
        if let Some((once, each)) = scored(&usage).zip(scored(&each)).filter(|_| !afresh) {
            assert!((4.0 * once / each - 1.0).abs() < 0.05, "{method}: {once} and {each}");
        }
    }
}

/// In one batch: a draft that chooses, two that keep to a choice, and an answer by the same method.
#[test]
fn drafts_that_choose_and_drafts_that_do_not_go_together() {
    for method in all_typical() {
        let prepare = || {
            let mut drafting = Drafting::new(1, None);
            let spec = json!({ "speculate": { "method": method, "choose": "round" } });
            let drafts = [0, 2, 1].map(|drafts| {
                let mut sequence = drafting.by(&spec);
                sequence.draft(true);
                (0..drafts).for_each(|_| drop(drafting.one(&mut sequence)));
                sequence
            });
            let answer = drafting.by(&json!({ "decode": method }));
            (drafting, drafts.into_iter().chain([answer]).collect::<Vec<_>>())
        };
        let (mut drafting, mut sequences) = prepare();
        let alone: Vec<Vec<f32>> = sequences.iter_mut().map(|sequence| drafting.one(sequence)).collect();
        let (mut drafting, mut sequences) = prepare();
        let together = drafting.step(&mut sequences.iter_mut().collect::<Vec<_>>(), 1, true);
        assert!(together == alone, "{method}");
    }
}
