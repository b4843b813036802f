use super::*;
use crate::artifacts::Place;
use crate::layer::AttentionShape;
use crate::methods::catalogue;
use crate::methods::tests::random_artifacts;

fn error(attention: Value) -> (String, String) {
    let error = AttentionSpec::from_json(&attention, "attention", &Artifacts::default()).unwrap_err();
    (error.path, error.message)
}

#[test]
fn defaults_are_filled_in() {
    let spec = AttentionSpec::from_json(
        &json!({ "prefill": { "method": "delta", "gamma": 32 } }),
        "attention",
        &Artifacts::default(),
    )
    .unwrap();
    assert_eq!(
        json!(spec),
        json!({
            "prefill": {
                "method": "delta", "gamma": 32, "tail": 128, "mode": "delta",
                "base": { "method": "streaming_llm", "sink": 4, "window": 2048 }
            },
            "decode": { "method": "dense" },
            "question": "prefill",
            "audit": 0.0
        })
    );
    assert_eq!(json!(AttentionSpec::from_json(&json!(spec), "attention", &Artifacts::default()).unwrap()), json!(spec));
}

#[test]
fn a_method_may_be_a_name_alone() {
    let object = json!({ "prefill": { "method": "delta" }, "decode": { "method": "quest" } });
    let name = json!({ "prefill": "delta", "decode": "quest" });
    let [object, name] = [object, name].map(|attention| {
        let spec = AttentionSpec::from_json(&attention, "attention", &Artifacts::default()).unwrap();
        assert_eq!(resolve(json!({}), Some(attention), [None, None, None]).unwrap(), json!(spec));
        json!(spec)
    });
    assert_eq!(name, object);
    let spec = resolve(json!({}), Some(json!({ "decode": "vattention" })), [Some(json!(0.2)), None, None]).unwrap();
    assert_eq!((&spec["decode"]["method"], &spec["decode"]["epsilon"]), (&json!("vattention"), &json!(0.2)));
    let error = resolve(json!({}), Some(json!({ "decode": "dense" })), [Some(json!(0.2)), None, None]).unwrap_err();
    let message = "chooses vattention for decode, but attention.decode chooses \"dense\"; give one of them";
    assert_eq!(error, SpecError::new("epsilon", message));
}

#[test]
fn a_method_within_a_method_may_be_a_name_alone() {
    let within = |method: Value| {
        json!({
            "prefill": { "method": "delta", "base": method["prefill"] },
            "decode": { "method": "santa", "within": { "method": "vattention", "top": method["predictor"] } },
            "speculate": { "method": { "method": "vattention", "top": method["predictor"] } },
        })
    };
    let [object, name] = [
        json!({ "prefill": { "method": "bigbird" }, "predictor": { "method": "quest" } }),
        json!({ "prefill": "bigbird", "predictor": "quest" }),
    ]
    .map(|method| json!(AttentionSpec::from_json(&within(method), "attention", &Artifacts::default()).unwrap()));
    assert_eq!(name, object);
    assert_eq!(name["decode"]["within"]["top"]["method"], "quest");
}

#[test]
fn a_question_has_tokens_that_somebody_knows() {
    let spec = |attention: Value| AttentionSpec::from_json(&attention, "attention", &Artifacts::default()).unwrap();
    let (plain, dense) = (spec(json!({})), spec(json!({ "question": "dense" })));
    let told = spec(json!({ "question": "decode", "question_tokens": 30 }));
    assert_eq!(plain.question_of(100, || Some(7)), Ok(0));
    assert_eq!(dense.question_of(100, || Some(7)), Ok(7));
    assert_eq!(told.question_of(100, || Some(7)), Ok(30));
    let error = told.question_of(20, || None).unwrap_err();
    assert_eq!((&*error.path, &*error.message), ("attention.question_tokens", "is 30, but the prompt has 20 tokens"));
    assert!(dense.question_of(100, || None).unwrap_err().message.starts_with("is missing"));
}

#[test]
fn every_error_names_its_path_and_what_is_valid() {
    let decode = |decode: Value| error(json!({ "decode": decode }));
    let names = |phase: &str| {
        let of_phase = catalogue().into_iter().filter(|m| m.phase == phase).map(|m| m.name);
        of_phase.collect::<Vec<_>>().join(", ")
    };
    for (found, path, message) in [
        (
            decode(json!({ "method": "vattention", "epsilon": 1.5 })),
            "attention.decode.epsilon",
            "must be a number greater than 0 and less than 1; got 1.5",
        ),
        (
            decode(json!({ "method": "vattention", "epsilonn": 0.1 })),
            "attention.decode.epsilonn",
            "unknown field `epsilonn`, did you mean `epsilon`?; vattention takes epsilon, delta, rule, tail, \
             sink, window, top_k, top, pilot_tokens, pilot_share, dense_share, dense_below",
        ),
        (
            decode(json!({ "method": "quest", "k": 1.0 })),
            "attention.decode.k",
            "must be a share of the context below 1, or 1, without a point, for one token; got 1.0",
        ),
        (
            decode(json!({ "method": "vattention", "top_k": 1.0 })),
            "attention.decode.top_k",
            "must be a share of the context below 1, or 1, without a point, for one token; got 1.0",
        ),
        (
            decode(json!({ "method": "vattention", "rule": "exact" })),
            "attention.decode.rule",
            "must be one of \"chi2\", \"ratio\", \"tight\", \"lemma\", \"denominator\"; got \"exact\"",
        ),
        (
            decode(json!({ "method": "vattention", "top": { "method": "oracel" } })),
            "attention.decode.top.method",
            &format!("unknown predictor \"oracel\", did you mean `oracle`?; predictors: {}", names("predictor")),
        ),
        (
            decode(json!({ "method": "vatention" })),
            "attention.decode.method",
            &format!(
                "unknown decode method \"vatention\", did you mean `vattention`?; decode methods: {}",
                names("decode")
            ),
        ),
        (
            decode(json!("delta")),
            "attention.decode.method",
            &format!("unknown decode method \"delta\", which is a prefill method; decode methods: {}", names("decode")),
        ),
        (
            error(json!({ "prefill": "quest" })),
            "attention.prefill.method",
            &format!(
                "unknown prefill method \"quest\", which is a decode method; prefill methods: {}",
                names("prefill")
            ),
        ),
        (
            decode(json!({ "epsilon": 0.1 })),
            "attention.decode.method",
            &format!("is missing; decode methods: {}", names("decode")),
        ),
        (
            error(json!({ "prefill": { "method": "delta", "base": { "method": "delta" } } })),
            "attention.prefill.base.method",
            "delta does not correct itself; base must be another method",
        ),
        (
            decode(json!("vatention")),
            "attention.decode.method",
            &format!(
                "unknown decode method \"vatention\", did you mean `vattention`?; decode methods: {}",
                names("decode")
            ),
        ),
        (
            decode(json!(7)),
            "attention.decode",
            "must be a decode method's name or an object such as {\"method\": \"dense\"}; got 7",
        ),
        (
            decode(json!({ "method": "vattention", "top": "oracel" })),
            "attention.decode.top.method",
            &format!("unknown predictor \"oracel\", did you mean `oracle`?; predictors: {}", names("predictor")),
        ),
        (
            decode(json!({ "method": "dense", "k": 3 })),
            "attention.decode.k",
            "unknown field `k`; dense takes no parameters",
        ),
        (
            decode(json!({ "method": "vattention", "top_k": 1.5 })),
            "attention.decode.top_k",
            "must be a whole number of tokens up to 1048576, or a share of the context below 1, or \"auto\"; got 1.5",
        ),
        (
            decode(json!({ "method": "oracle_top_k", "k": 1.5 })),
            "attention.decode.k",
            "must be a whole number of tokens up to 1048576, or a share of the context below 1; got 1.5",
        ),
        (
            error(json!({ "prefill": { "method": "delta", "gamma": 0 } })),
            "attention.prefill.gamma",
            "must be a whole number at least 1 and at most 1048576; got 0",
        ),
        (
            error(json!({ "prefill": { "method": "delta", "gamma": 2.5 } })),
            "attention.prefill.gamma",
            "must be a whole number at least 1 and at most 1048576; got 2.5",
        ),
        (
            error(json!({ "prefill": { "method": "delta", "base": { "method": "streaming_llm", "window": -1 } } })),
            "attention.prefill.base.window",
            "must be a whole number at least 1 and at most 1048576; got -1",
        ),
        (
            error(json!({ "audit": 2 })),
            "attention.audit",
            "must be a share of tokens between 0 and 1, or true for all of them; got 2",
        ),
        (
            error(json!({ "decoed": {} })),
            "attention.decoed",
            "unknown field `decoed`, did you mean `decode`?; attention takes prefill, decode, question, question_tokens, audit, trace, speculate",
        ),
        (
            error(json!([])),
            "attention",
            "must be an object with any of prefill, decode, question, question_tokens, audit, trace, speculate",
        ),
    ] {
        assert_eq!((found.0.as_str(), found.1.as_str()), (path, message));
    }
}

fn resolve(preset: Value, attention: Option<Value>, short: [Option<Value>; 3]) -> Result<Value, SpecError> {
    let preset = AttentionSpec::from_json(&preset, "preset", &Artifacts::default()).unwrap();
    let [epsilon, delta, gamma] = &short;
    let wire =
        Wire { attention: attention.as_ref(), epsilon: epsilon.as_ref(), delta: delta.as_ref(), gamma: gamma.as_ref() };
    AttentionSpec::resolve(&preset, &wire, &Artifacts::default()).map(|spec| json!(spec))
}

#[test]
fn short_forms_stand_over_the_preset() {
    let preset = json!({
        "prefill": { "method": "streaming_llm", "window": 512 },
        "decode": { "method": "vattention", "rule": "ratio", "delta": 0.3 }
    });
    let spec = resolve(preset.clone(), None, [Some(json!(0.2)), None, Some(json!(16))]).unwrap();
    assert_eq!(spec["decode"]["epsilon"], 0.2);
    assert_eq!(spec["decode"]["delta"], 0.3, "the preset's");
    assert_eq!(spec["decode"]["rule"], "ratio", "the preset's");
    assert_eq!(spec["prefill"]["gamma"], 16);
    assert_eq!(spec["prefill"]["base"], json!({ "method": "streaming_llm", "sink": 4, "window": 512 }));
    let spec = resolve(json!({}), None, [None, Some(json!(0.2)), Some(json!(16))]).unwrap();
    assert_eq!((&spec["decode"]["method"], &spec["decode"]["delta"]), (&json!("vattention"), &json!(0.2)));
    assert_eq!(spec["prefill"]["base"]["method"], "streaming_llm", "Delta over dense would be dense");
    assert_eq!(resolve(preset.clone(), None, [None, None, None]).unwrap()["decode"]["rule"], "ratio");
    let spec = resolve(preset, Some(json!({ "decode": { "method": "dense" } })), [None, None, None]).unwrap();
    assert_eq!(spec["decode"], json!({ "method": "dense" }));
    assert_eq!(spec["prefill"]["window"], 512, "the object left prefill to the preset");
}

#[test]
fn short_forms_join_an_object_that_agrees_and_refuse_one_that_does_not() {
    let vattention = json!({ "decode": { "method": "vattention", "delta": 0.3 } });
    let spec = resolve(json!({}), Some(vattention.clone()), [Some(json!(0.2)), Some(json!(0.3)), None]).unwrap();
    assert_eq!((&spec["decode"]["epsilon"], &spec["decode"]["delta"]), (&json!(0.2), &json!(0.3)));
    let error = resolve(json!({}), Some(vattention), [None, Some(json!(0.2)), None]).unwrap_err();
    assert_eq!(error, SpecError::new("delta", "is 0.2, but attention.decode.delta is 0.3; give one of them"));
    let dense = json!({ "decode": { "method": "dense" }, "prefill": { "method": "dense" } });
    let error = resolve(json!({}), Some(dense.clone()), [Some(json!(0.2)), None, None]).unwrap_err();
    let message = "chooses vattention for decode, but attention.decode chooses \"dense\"; give one of them";
    assert_eq!(error, SpecError::new("epsilon", message));
    assert_eq!(resolve(json!({}), Some(dense), [None, None, Some(json!(4))]).unwrap_err().path, "gamma");
}

#[test]
fn an_error_in_a_short_form_names_the_short_form() {
    for (short, path) in [
        ([Some(json!(1)), None, None], "epsilon"),
        ([None, Some(json!("x")), None], "delta"),
        ([None, None, Some(json!(-3))], "gamma"),
    ] {
        assert_eq!(resolve(json!({}), None, short).unwrap_err().path, path);
    }
}

#[test]
fn contexts_that_the_server_has_read_whole_are_those_where_nobody_says_otherwise() {
    let here = Artifacts::default().with_dense_below(4096);
    let of = |preset: Value, attention: Option<Value>, epsilon: Option<Value>| {
        let preset = AttentionSpec::from_json(&preset, "attention", &here).unwrap();
        let wire = Wire { attention: attention.as_ref(), epsilon: epsilon.as_ref(), ..Wire::default() };
        let spec = AttentionSpec::resolve(&preset, &wire, &here).unwrap();
        json!(spec)["decode"].get("dense_below").cloned()
    };
    let quest = |least: usize| json!({ "decode": { "method": "quest", "dense_below": least } });
    let (server, said) = (Some(json!(4096)), |tokens: usize| Some(json!(tokens)));
    // By short form, by name, by the server's own default; dense attention reads everything anyway.
    assert_eq!(of(json!({}), None, Some(json!(0.1))), server);
    assert_eq!(of(json!({}), Some(json!({ "decode": "quest" })), None), server);
    assert_eq!(of(json!({ "decode": "vattention" }), None, None), server);
    assert_eq!(of(json!({ "decode": "vattention" }), None, Some(json!(0.1))), server);
    assert_eq!(of(json!({}), None, None), None);
    // Whoever says it, in the request or the preset, is heard, also that it is nothing.
    assert_eq!(of(json!({}), Some(quest(7)), None), said(7));
    assert_eq!(of(json!({}), Some(quest(0)), None), said(0));
    assert_eq!(of(quest(9), None, None), said(9));
    // Drafts are another matter: what they are for is to be cheap.
    let drafts = json!({ "speculate": { "method": "quest" } });
    let spec = AttentionSpec::from_json(&drafts, "attention", &here).unwrap();
    assert_eq!(json!(spec)["speculate"]["method"].get("dense_below"), None);
}

#[test]
fn what_runs_in_host_memory_alone_is_refused_elsewhere_with_what_is_not() {
    // Channels of 8 elements, for which a device has no kernel.
    let shape = AttentionShape { layers: 1, q_heads: 4, kv_heads: 2, head_dim: 64, window: None };
    let narrow = || random_artifacts(shape);
    let device = narrow().at(Place::Device);
    let channels = "an artefact of 8 channels, not [16, 32, 64, 128], runs on the CPU only, and this model does not; ";
    let labels = json!({ "method": "double_sparsity" });
    for (attention, path, message) in [
        (
            json!({ "decode": labels }),
            "attention.decode.method",
            "decode methods here: dense, hash_attention, kmeans, ",
        ),
        (
            json!({ "decode": { "method": "santa", "within": labels } }),
            "attention.decode.within.method",
            "decode methods here: dense, ",
        ),
        (
            json!({ "decode": { "method": "vattention", "top": labels } }),
            "attention.decode.top.method",
            "predictors here: hash_attention, kmeans, oracle, quantized_keys, quest, saap",
        ),
    ] {
        let error = AttentionSpec::from_json(&attention, "attention", &device).unwrap_err();
        assert_eq!(error.path, path, "{attention}");
        assert!(error.message.starts_with(&format!("{channels}{message}")), "{attention}: {}", error.message);
        assert!(AttentionSpec::from_json(&attention, "attention", &narrow()).is_ok(), "{attention}");
    }
    // A request over a preset says so too.
    let sparse = json!({ "decode": labels });
    let wire = Wire { attention: Some(&sparse), ..Wire::default() };
    let error = AttentionSpec::resolve(&AttentionSpec::default(), &wire, &device).unwrap_err();
    assert_eq!(error.path, "attention.decode.method");
}

#[test]
fn drafts_are_a_decode_methods_or_looked_up() {
    let spec = |speculate: Value| {
        AttentionSpec::from_json(&json!({ "speculate": speculate }), "attention", &Artifacts::default())
    };
    let json = |speculate: Value| json!(spec(speculate).unwrap());
    let window = json!({ "method": "streaming_llm", "sink": 4, "window": 1024 });
    assert_eq!(
        json(json!({ "method": window })),
        json(json!({ "method": window, "tokens": 4, "choose": "round", "lookup": 0 }))
    );
    assert_eq!(
        json(json!({ "method": "dense", "tokens": 15 }))["speculate"],
        json!({ "method": { "method": "dense" }, "tokens": 15, "choose": "round", "lookup": 0 })
    );
    assert_eq!(json(json!({ "lookup": 3 }))["speculate"], json!({ "tokens": 4, "lookup": 3 }));
    assert_eq!(json(json!({ "method": "quest", "choose": "token" }))["speculate"]["choose"], "token");
    assert_eq!(json(json!(null)).get("speculate"), None);
    for (speculate, path, message) in [
        (
            json!("quest"),
            "",
            "must be an object such as {\"method\": {\"method\": \"quest\"}, \"tokens\": 4} or {\"lookup\": 3}, or null",
        ),
        (json!({ "tokens": 4 }), ".method", "is missing"),
        (json!({ "lookup": 0 }), ".method", "is missing, and nothing is looked up"),
        (json!({ "lookup": 65 }), ".lookup", "must be a whole number at least 0 and at most 64; got 65"),
        (json!({ "lookup": true }), ".lookup", "at most 64; got true"),
        (
            json!({ "method": "quest", "tokens": 0 }),
            ".tokens",
            "must be a whole number at least 1 and at most 15; got 0",
        ),
        (json!({ "method": "quest", "tokens": 16 }), ".tokens", "at most 15; got 16"),
        (json!({ "method": "quest", "token": 4 }), ".token", "did you mean `tokens`?"),
        (
            json!({ "method": "quest", "choose": "once" }),
            ".choose",
            "must be one of \"token\", \"round\"; got \"once\"",
        ),
        (json!({ "method": "quest", "choose": null }), ".choose", "got null"),
        (json!({ "method": "quest", "chose": "round" }), ".chose", "did you mean `choose`?"),
        (json!({ "method": "qest" }), ".method.method", "did you mean `quest`?"),
        (json!({ "method": { "method": "quest", "k": -1 } }), ".method.k", "must be"),
    ] {
        let error = spec(speculate).unwrap_err();
        assert_eq!(error.path, format!("attention.speculate{path}"));
        assert!(error.message.contains(message), "{}", error.message);
    }
    // Over a server's preset, which it takes off, too.
    let preset = spec(json!({ "method": "dense" })).unwrap();
    let over = |attention: Value| {
        let wire = Wire { attention: Some(&attention), ..Wire::default() };
        AttentionSpec::resolve(&preset, &wire, &Artifacts::default()).unwrap().drafting()
    };
    let of = |tokens, lookup, by_method| Drafting { tokens, lookup, by_method };
    assert_eq!((over(json!({})), over(json!({ "speculate": null }))), (of(4, 0, true), Drafting::default()));
    assert_eq!(over(json!({ "speculate": { "method": "quest", "tokens": 2 } })), of(2, 0, true));
    assert_eq!(over(json!({ "speculate": { "lookup": 3, "tokens": 9 } })), of(9, 3, false));
    assert_eq!(over(json!({ "speculate": { "lookup": 64, "method": "quest" } })), of(4, 64, true));
}
