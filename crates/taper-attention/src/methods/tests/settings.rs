//! What methods are by default, and that they do what their ranges allow.

use super::prefill::every_sparse;
use super::properties::all_typical;
use super::*;

/// Each parameter's default and range. A change of them changes what requests come to that say nothing of it.
#[test]
fn defaults_and_ranges_are_those_that_are_written_down() {
    let known = ["default", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"];
    let of = |property: &Value| -> Value {
        let said = property.as_object().unwrap().iter().filter(|(key, _)| known.contains(&key.as_str()));
        said.map(|(key, value)| (key.clone(), value.clone())).collect()
    };
    let method = |method: MethodInfo| {
        let properties = method.parameters["properties"].as_object().unwrap().clone();
        let properties = properties.into_iter().map(|(name, property)| format!("    {name}: {}", of(&property)));
        format!("{} {}\n{}\n", method.phase, method.name, properties.collect::<Vec<_>>().join("\n"))
    };
    let found: String = catalogue().into_iter().map(method).collect();
    assert!(found == include_str!("settings.txt"), "settings.txt should be\n{found}");
}

/// Every method with each of its numbers at either end of its range.
#[test]
fn what_a_range_allows_can_be_run() {
    let shape = shape(3, 64, None);
    let artifacts = random_artifacts(shape);
    let input = Input::random(shape, 200);
    let decode = all_typical().into_iter().map(|settings| ("decode", settings));
    let prefill = every_sparse().into_iter().map(|settings| ("prefill", settings));
    let mut ends = 0;
    for (phase, settings) in decode.chain(prefill) {
        let methods = catalogue();
        let method = methods.iter().find(|m| m.phase == phase && m.name == settings["method"]).unwrap();
        for (name, property) in method.parameters["properties"].as_object().unwrap() {
            for end in ["minimum", "maximum"] {
                let Some(end) = property[end].as_number() else { continue };
                let mut settings = settings.clone();
                settings[name] = json!(end);
                let spec = json!({ phase: settings });
                if AttentionSpec::from_json(&spec, "attention", &artifacts).is_err() {
                    continue; // One of few numbers, or one that goes with another's.
                }
                let decoded = if phase == "decode" { 2 } else { 0 };
                let (out, _) = run_on(&spec, &artifacts, shape, &input, decoded, usize::MAX);
                assert!(out.iter().all(|x| x.is_finite()), "{settings}");
                ends += 1;
            }
        }
    }
    assert!(ends > 200, "{ends}");
}
