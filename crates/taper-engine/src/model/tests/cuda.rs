//! What the engine asks of a model on a CUDA device: there must be one.

use super::*;
use taper_model::ModelConfig;

fn device() -> Device {
    DeviceChoice::Cuda(0).open().expect("the feature `cuda` needs a CUDA device")
}

fn draw(at: usize) -> Draw {
    let temperature = [0.0, 0.7, 1.0][at % 3];
    Draw { temperature, top_k: 0, top_p: [1.0, 0.9][at % 2], min_p: 0.0, uniform: (at * 37 % 101) as f64 / 101.0 }
}

#[test]
fn a_devices_rows_are_drawn_as_the_hosts() {
    let (rows, vocab) = (12, 1000);
    let logits = Tensor::randn(0f32, 3f32, (rows, vocab), &Device::Cpu).unwrap();
    let there = logits.to_device(&device()).unwrap();
    let tokens: Vec<Wanted> = (0..rows).map(|at| Wanted::Token(draw(at))).collect();
    let some: Vec<Wanted> =
        tokens.iter().enumerate().map(|(at, of)| if at % 4 == 1 { Wanted::Logits } else { *of }).collect();
    for wanted in [tokens, some, vec![Wanted::Logits; rows]] {
        let (host, device) = (drawn(&logits, &wanted).unwrap(), drawn(&there, &wanted).unwrap());
        assert_eq!(host, device);
        assert!(
            host.iter().zip(&wanted).all(|(row, of)| matches!(row, Row::Token(_)) == matches!(of, Wanted::Token(_)))
        );
    }
    // What cannot be drawn from says so, and those beside it are drawn.
    let bad = Tensor::cat(&[&there.narrow(0, 0, 1).unwrap(), &(there.narrow(0, 1, 1).unwrap() * f64::NAN).unwrap()], 0);
    let rows = drawn(&bad.unwrap(), &[Wanted::Token(draw(0)), Wanted::Token(draw(1))]).unwrap();
    assert!(matches!(rows[..], [Row::Token(Some(_)), Row::Token(None)]));
}

/// A model of random weights on the device, with a cache of so many blocks.
fn on_device(blocks: usize) -> ModelBackend {
    let config = ModelConfig { layers: 3, vocab_size: 304, ..ModelConfig::of_shape("smollm2-135m").unwrap() };
    let model = Model::random(&config, DType::BF16, &device()).unwrap();
    let shape = model.attention_shape();
    let shape = KvShape { layers: shape.layers, kv_heads: shape.kv_heads, head_dim: shape.head_dim };
    let pool = KvPool::new(shape, DType::BF16, blocks, model.device()).unwrap();
    ModelBackend::new(model, pool, false)
}

#[test]
fn an_embedding_has_the_final_norm() {
    let mut backend = on_device(4);
    let prompt: Vec<u32> = (0..100).map(|i| i * 7 % 304).collect();
    let mut sequence = backend.open(&Arc::default(), 1, &prompt, 0).unwrap();
    let rows = backend.forward(vec![Input::whole(&mut sequence, &prompt, Some(Wanted::Hidden))]).unwrap();
    let [Row::Hidden(embedding)] = &rows[0][..] else { panic!("no embedding") };
    // A random model's norms have weights of one.
    let square = embedding.iter().map(|x| f64::from(*x).powi(2)).sum::<f64>() / embedding.len() as f64;
    assert!((square - 1.0).abs() < 1e-2, "{square}");
}

#[test]
fn rows_of_several_tokens_of_an_input_come_with_those_of_others() {
    let mut backend = on_device(40);
    let spec = Arc::new(AttentionSpec::default());
    let prompt: Vec<u32> = (0..100).map(|i| i * 7 % 304).collect();
    let mut sequences: Vec<Sequence> = (0..3).map(|seed| backend.open(&spec, seed, &prompt, 0).unwrap()).collect();
    for sequence in &mut sequences {
        let rows = backend.forward(vec![Input::whole(sequence, &prompt, Some(Wanted::Logits))]).unwrap();
        assert!(matches!(&rows[0][..], [Row::Logits(_)]));
    }
    let tokens = [5, 9, 200, 31];
    let counts = [4, 1, 3];
    let mut forward = |wants: &dyn Fn(usize) -> Wanted| -> Vec<Vec<Row>> {
        let inputs = sequences.iter_mut().enumerate().map(|(at, sequence)| {
            let wants = (0..counts[at]).map(|row| wants(at + 3 * row)).collect();
            Input { sequence, tokens: &tokens[..counts[at]], effort: counts[at], wants, next: None }
        });
        let rows = backend.forward(inputs.collect()).unwrap();
        sequences.iter_mut().for_each(|sequence| backend.truncate(sequence, prompt.len()).unwrap());
        rows
    };
    let logits = forward(&|_| Wanted::Logits);
    assert!(logits.iter().map(Vec::len).eq(counts));
    let drawn = forward(&|at| Wanted::Token(draw(at)));
    for (at, (logits, drawn)) in logits.into_iter().zip(drawn).enumerate() {
        for (row, (logits, drawn)) in logits.into_iter().zip(drawn).enumerate() {
            assert_eq!(drawn, Row::Token(token::pick(&logits.logits().unwrap(), &draw(at + 3 * row))));
        }
    }
    sequences.into_iter().for_each(|sequence| backend.close(sequence));
    backend.check_idle();
}

#[test]
fn drafts_by_the_method_that_checks_them_are_nearly_all_right() {
    const BLOCKS: usize = 60;
    for (decode, temperature) in [("dense", 0.0), ("dense", 0.8), ("quest", 0.8)] {
        let backend = Watched::new(on_device(BLOCKS));
        let seen = Arc::clone(&backend.seen);
        let model = ModelInfo { id: "random".into(), created: 0 };
        let engine = Engine::start(backend, Arc::new(StubText), model, EngineConfig::default()).unwrap();
        let method = json!({ "method": decode });
        // A draft that keeps to another's keys reads others than the check does.
        let spec = json!({ "decode": method, "speculate": { "method": method, "tokens": 3, "choose": "token" } });
        let attention = Arc::new(AttentionSpec::from_json(&spec, "attention", &Artifacts::default()).unwrap());
        let requests = (0..3).map(|number| Request {
            prompt: (0..300 + 700 * number).map(|i| (i * i + 7 * i + number) as u32 % 304).collect(),
            attention: Arc::clone(&attention),
            sampling: SamplingParams { temperature, top_p: 0.9, seed: 5, ..SamplingParams::default() },
            stop: StopRules { ignore_eos: true, max_tokens: Some(60), ..StopRules::default() },
            choices: 1,
            ..request()
        });
        let events: Vec<_> = requests.map(|request| engine.submit(request).unwrap()).collect();
        for mut events in events {
            let mut last = None;
            while let Some(event) = events.blocking_recv() {
                last = Some(event);
            }
            let Some(Event::Done(usage)) = last else { panic!("{last:?}") };
            assert_eq!(usage.completion_tokens, 60);
            let usage = usage.attention[0].speculation.as_ref().unwrap();
            println!("{spec}, temperature {temperature}: {} of {} drafts are right", usage.accepted, usage.drafted);
            // Products of four rows add in another order than those of one.
            assert!(usage.drafted >= 40 && usage.acceptance > 0.8, "{usage:?}");
        }
        assert_eq!(free_when_idle(&engine, &seen), BLOCKS);
    }
}

#[test]
fn steps_begun_ahead_draw_what_others_draw() {
    let prompts: Vec<Vec<u32>> = (1..4).map(|n| (0..140 * n).map(|i| (i * i + 3 * i + n) % 256).collect()).collect();
    let quest = json!({ "method": "quest", "dense_layers": 1, "sink": 8, "window": 16, "k": 40 });
    let vattention =
        json!({ "method": "vattention", "epsilon": 0.3, "pilot_tokens": 16, "top": { "method": "quest" } });
    let dense = json!({ "method": "dense" });
    for (rows, temperature, decode) in [
        (1, 0.0, &dense),
        (1, 0.9, &dense),
        (3, 0.9, &dense),
        (1, 0.9, &quest),
        (3, 0.9, &quest),
        (1, 0.9, &vattention),
        (3, 0.9, &vattention),
        (2, 0.9, &json!({ "method": "santa", "samples": 16 })),
    ] {
        let spec = AttentionSpec::from_json(&json!({ "decode": decode }), "attention", &Artifacts::default()).unwrap();
        let spec = Arc::new(spec);
        let mut backend = on_device(40);
        let mut run = |runs_ahead: bool| {
            backend.run_ahead(runs_ahead);
            let mut sequences: Vec<Sequence> = Vec::new();
            for prompt in &prompts[..rows] {
                let mut sequence = backend.open(&spec, 1, prompt, 0).unwrap();
                backend.forward(vec![Input::whole(&mut sequence, prompt, Some(Wanted::Logits))]).unwrap();
                sequences.push(sequence);
            }
            let (mut tokens, mut all) = (vec![7; rows], Vec::new());
            for at in 0..120 {
                let draw = |at: usize| Draw { temperature, uniform: (at as f64 * 0.618) % 1.0, ..Draw::LIKELIEST };
                let input = |(sequence, token)| {
                    let wants = Some(Wanted::Token(draw(at)));
                    Input { next: Some(draw(at + 1)), ..Input::whole(sequence, std::slice::from_ref(token), wants) }
                };
                let drawn = backend.forward(sequences.iter_mut().zip(&tokens).map(input).collect()).unwrap();
                let token =
                    |rows: &Vec<Row>| if let [Row::Token(Some(token))] = rows[..] { token } else { panic!("{rows:?}") };
                tokens = drawn.iter().map(token).collect();
                all.extend_from_slice(&tokens);
            }
            let usage: Vec<_> = sequences.iter().map(|sequence| json!(backend.usage(sequence))).collect();
            sequences.into_iter().for_each(|sequence| backend.close(sequence));
            backend.check_idle();
            (all, usage, backend.followed())
        };
        let (expected, usage, none) = run(false);
        let (drawn, by_both, followed) = run(true);
        assert_eq!((drawn, by_both), (expected, usage), "{rows} rows at {temperature}, {decode}");
        // All but the first, and those that begin a block.
        assert!(none == 0 && followed > 110 * rows, "{followed} of {rows} rows");
    }
}
