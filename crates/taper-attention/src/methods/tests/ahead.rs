//! Pages that are chosen by the query of the token before.

use super::*;

const SHAPE: AttentionShape = AttentionShape { layers: 2, q_heads: 2, kv_heads: 1, head_dim: 8, window: None };
const PROMPT: usize = 200;
/// Pages of 16 that hold the keys one kind of query wants each.
const WANTED: [usize; 2] = [3, 7];

/// Tokens whose values say on which page they lie, and queries each of which wants one of two pages.
struct Asking {
    pool: KvPool,
    k: Tensor,
    v: Tensor,
}

impl Asking {
    fn new() -> Self {
        let kv = KvShape { layers: SHAPE.layers, kv_heads: 1, head_dim: 8 };
        let page = |token: usize| WANTED.iter().position(|&page| page == token / 16);
        let of = |token: usize, i: usize| if page(token) == Some(i) { 3.0f32 } else { 0.0 };
        let tokens = 2 * PROMPT;
        let vectors = || (0..tokens).flat_map(|token| (0..8).map(move |i| of(token, i)));
        let tensor = |x: Vec<f32>| Tensor::from_vec(x, (tokens, 1, 8), &Device::Cpu).unwrap();
        Self {
            pool: KvPool::new(kv, DType::F32, 20, &Device::Cpu).unwrap(),
            k: tensor(vectors().collect()),
            v: tensor(vectors().map(|x| x / 3.0).collect()),
        }
    }

    fn sequence(decode: Value) -> Sequence {
        let spec = AttentionSpec::from_json(&json!({ "decode": decode }), "attention", &Artifacts::default()).unwrap();
        Sequence::new(Arc::new(spec), 1, PROMPT)
    }

    /// The next tokens, whose queries want these pages: which of them each row has read, in each layer, of which the second wants
    /// the other page.
    fn step(&mut self, sequence: &mut Sequence, wants: &[usize]) -> Vec<Vec<[bool; 2]>> {
        let (start, tokens) = (sequence.len(), wants.len());
        let spans = vec![Span { sequence, tokens }];
        let mut batch = AttentionBatch::new(SHAPE, &Still(8), &mut self.pool, spans).unwrap();
        let part = |t: &Tensor| t.narrow(0, start, tokens).unwrap();
        let layer = |layer: usize| {
            // Wanted enough to be ranked first, and little enough for all that is read to have a say.
            let query = |i: usize, wants: usize| if i == (wants + layer) % 2 { 0.2f32 } else { 0.0 };
            let q = wants.iter().flat_map(|&wants| (0..2).flat_map(move |_| (0..8).map(move |i| query(i, wants))));
            let q = Tensor::from_iter(q, &Device::Cpu).unwrap().reshape((tokens, 2, 8)).unwrap();
            let out = batch.attend(layer, &q, &part(&self.k), &part(&self.v)).unwrap().to_vec3::<f32>().unwrap();
            out.iter().map(|row| [0, 1].map(|page| row[0][page] > 0.01)).collect()
        };
        let read = (0..SHAPE.layers).map(layer).collect();
        batch.finish().unwrap();
        read
    }

    /// A prompt whose last query wants a page.
    fn prompt(&mut self, sequence: &mut Sequence, wants: usize) {
        let others = vec![1 - wants; PROMPT - 1];
        self.step(sequence, &[&others[..], &[wants]].concat());
    }
}

/// That each row read the page of this number alone, and in the second layer the other.
fn alone(pages: &[usize]) -> Vec<Vec<[bool; 2]>> {
    let read = |page: usize| [page == 0, page == 1];
    [0, 1].map(|layer| pages.iter().map(|page| read((page + layer) % 2)).collect()).to_vec()
}

fn quest(ahead: bool) -> Value {
    json!({ "method": "quest", "k": 16, "sink": 1, "window": 8, "dense_layers": 0, "ahead": ahead })
}

#[test]
fn a_row_reads_what_the_token_before_wanted() {
    for ahead in [false, true] {
        let mut asking = Asking::new();
        let mut sequence = Asking::sequence(quest(ahead));
        asking.prompt(&mut sequence, 0);
        // One by one and several at once.
        let rows = [1, 1, 0, 1, 0, 0, 1];
        let before = [0, 1, 1, 0, 1, 0, 0];
        let expected = if ahead { before } else { rows };
        for at in 0..4 {
            assert_eq!(asking.step(&mut sequence, &rows[at..=at]), alone(&expected[at..=at]), "{ahead}, row {at}");
        }
        assert_eq!(asking.step(&mut sequence, &rows[4..]), alone(&expected[4..]), "{ahead}");
        // Of a draft that was wrong nothing is left, and the tokens before it are as they were.
        sequence.truncate(&mut asking.pool, PROMPT + 6).unwrap();
        assert_eq!(asking.step(&mut sequence, &[1]), alone(&[if ahead { rows[5] } else { 1 }]), "{ahead}");
        // Where the token before is not known a row asks by itself.
        sequence.truncate(&mut asking.pool, PROMPT + 3).unwrap();
        assert_eq!(asking.step(&mut sequence, &[0]), alone(&[0]), "{ahead}");
        assert_eq!(asking.step(&mut sequence, &[1]), alone(&[if ahead { 0 } else { 1 }]), "{ahead}");
    }
}

/// A step that fails, or that nobody asks for, is followed by one that finds what it found.
#[test]
fn a_step_that_comes_again_finds_what_it_found() {
    let mut asking = Asking::new();
    let mut sequence = Asking::sequence(quest(true));
    asking.prompt(&mut sequence, 1);
    for held in [false, true] {
        let spans = vec![Span { sequence: &mut sequence, tokens: 1 }];
        let mut batch = AttentionBatch::new(SHAPE, &Still(8), &mut asking.pool, spans).unwrap();
        let (q, kv) =
            (Tensor::ones((1, 2, 8), DType::F32, &Device::Cpu).unwrap(), asking.k.narrow(0, PROMPT, 1).unwrap());
        for layer in 0..if held { SHAPE.layers } else { 1 } {
            batch.attend(layer, &q, &kv, &kv).unwrap();
        }
        if held {
            batch.hold();
        }
    }
    assert_eq!(asking.step(&mut sequence, &[0]), alone(&[1]));
    assert_eq!(asking.step(&mut sequence, &[0]), alone(&[0]));
}

/// What goes on from another sequence, or comes again after it gave its blocks back, has what was asked there.
#[test]
fn sequences_that_share_a_beginning_share_its_last_query() {
    let mut asking = Asking::new();
    let mut first = Asking::sequence(quest(true));
    asking.prompt(&mut first, 0);
    // Two heads of eight in each layer, of a prompt of 200 tokens.
    assert_eq!(first.queries.elements(), 2 * 8 * SHAPE.layers);
    let mut fork = first.fork(&mut asking.pool, 2).unwrap();
    assert_eq!(fork.queries.elements(), 2 * 8 * SHAPE.layers);
    assert_eq!(asking.step(&mut first, &[1]), alone(&[0]));
    assert_eq!(asking.step(&mut fork, &[1]), alone(&[0]));
    first.retract(&mut asking.pool);
    let mut prompt = Asking::sequence(quest(true));
    asking.prompt(&mut prompt, 0);
    Sequence::rejoin(vec![&mut first], &mut asking.pool, prompt).unwrap();
    assert_eq!(asking.step(&mut first, &[1]), alone(&[0]));
    let mut other =
        KvPool::new(KvShape { layers: SHAPE.layers, kv_heads: 1, head_dim: 8 }, DType::F16, 20, &Device::Cpu).unwrap();
    let mut moved = first.move_to(&asking.pool, &mut other, 3).unwrap();
    std::mem::swap(&mut asking.pool, &mut other);
    assert_eq!(asking.step(&mut moved, &[0]), alone(&[1]));
}

/// A prompt that goes in slices leaves its last query as one that goes at once does.
#[test]
fn a_prompt_in_slices_leaves_its_last_query() {
    let shape = AttentionShape { layers: 2, ..shape(2, 64, None) };
    let decode = json!({ "method": "quest", "k": 32, "sink": 1, "window": 8, "dense_layers": 0, "ahead": true });
    let input = Input::random(shape, 240);
    let (whole, _) = run_in(&json!({ "decode": decode }), &Artifacts::default(), (shape, DType::F32), &input, 40, 4096);
    let spec = AttentionSpec::from_json(&json!({ "decode": decode }), "attention", &Artifacts::default()).unwrap();
    let kv = KvShape { layers: 2, kv_heads: shape.kv_heads, head_dim: shape.head_dim };
    let mut pool = KvPool::new(kv, DType::F32, 4, &Device::Cpu).unwrap();
    let mut sequence = Sequence::new(Arc::new(spec), 5, 200);
    let part = |t: &Tensor, start: usize, tokens: usize| t.narrow(0, start, tokens).unwrap();
    let mut chunk = crate::Chunk::new(shape, &mut pool, &mut sequence, 200).unwrap();
    while let Some(slice) = chunk.next(64) {
        if slice.ends.is_some() {
            chunk.attend(&slice).unwrap();
        }
        let (start, rows) = (slice.rows.start, slice.rows.len());
        let qkv = slice
            .begins
            .map(|_| (part(&input.q, start, rows), part(&input.k, start, rows), part(&input.v, start, rows)));
        chunk.put(&slice, qkv).unwrap();
    }
    chunk.pause();
    sequence.take_in(&mut pool);
    let mut outs = [Vec::new(), Vec::new()];
    for at in 200..240 {
        let spans = vec![Span { sequence: &mut sequence, tokens: 1 }];
        let rotary = PlainRotary(64);
        let mut batch = AttentionBatch::new(shape, &rotary, &mut pool, spans).unwrap();
        for (layer, outs) in outs.iter_mut().enumerate() {
            let out =
                batch.attend(layer, &part(&input.q, at, 1), &part(&input.k, at, 1), &part(&input.v, at, 1)).unwrap();
            outs.extend(out.flatten_all().unwrap().to_vec1::<f32>().unwrap());
        }
        batch.finish().unwrap();
    }
    let width = shape.q_heads * shape.head_dim;
    for (whole, own) in whole.iter().zip(&outs) {
        assert!(whole[200 * width..] == own[..]);
    }
}

/// Rows that see no whole page yet read everything, beside others that choose.
#[test]
fn a_context_shorter_than_a_page_is_read_whole() {
    let shape = AttentionShape { layers: 1, ..shape(2, 64, None) };
    let input = Input::random(shape, 210);
    let run = |decode: Value| {
        run_in(&json!({ "decode": decode }), &Artifacts::default(), (shape, DType::F32), &input, 207, 4096).0.remove(0)
    };
    for page in [4, 16, 64] {
        let ahead = json!({ "method": "quest", "k": 4, "sink": 1, "window": 2, "page": page, "dense_layers": 0, "ahead": true });
        let (dense, ahead) = (run(json!("dense")), run(ahead));
        let rows = |out: &[f32], rows: std::ops::Range<usize>| {
            let width = shape.q_heads * shape.head_dim;
            out[rows.start * width..rows.end * width].to_vec()
        };
        let error = relative(&rows(&ahead, 0..page), &rows(&dense, 0..page));
        assert!(error < 1e-6, "pages of {page}: {error}");
        assert!(relative(&rows(&ahead, 200..210), &rows(&dense, 200..210)) > 1e-2, "pages of {page}");
    }
}
