//! What `GET /v1/attention/methods` answers: every method, and the JSON Schema of the whole `attention` object. What
//! the schema takes is what a request may say, no more and no less.

use crate::dense_below;
use crate::methods::{MethodInfo, catalogue};
use crate::spec::AttentionSpec;
use crate::speculate::{Choose, MOST_DRAFTS, MOST_LOOKUP};
use serde_json::{Map, Value, json};

impl AttentionSpec {
    /// Every method with the JSON Schema of its object, the schema of the `attention` object, and `self` as the
    /// attention of a request that says nothing of it. `least` is the server's default of `dense_below`.
    pub fn document(&self, least: usize) -> Value {
        let methods = catalogue();
        // Not of drafts, nor of a method within another.
        let by_default = |schema: &mut Value| {
            let properties = schema.get_mut("properties");
            if let Some(property) = properties.and_then(|properties| properties.get_mut(dense_below::FIELD)) {
                property["default"] = json!(least);
            }
        };
        let data = methods.iter().map(|method| {
            let mut info = json!(method);
            info["parameters"] = method_schema(method, &methods, &[]);
            by_default(&mut info["parameters"]);
            info
        });
        let mut schema = attention_schema(&methods);
        schema["properties"]["decode"]["oneOf"].as_array_mut().into_iter().flatten().for_each(by_default);
        json!({ "object": "list", "data": data.collect::<Vec<_>>(), "schema": schema, "default": self })
    }
}

fn attention_schema(methods: &[MethodInfo]) -> Value {
    let named = |phase: &str| named(phase, methods, &[]);
    json!({
        "type": "object",
        "description": "How a request is attended; what is absent is the server's default.",
        "properties": {
            "prefill": { "description": "The prompt: a method, or its name.", "oneOf": named("prefill") },
            "decode": { "description": "The generated tokens: a method, or its name.", "oneOf": named("decode") },
            "question": {
                "description": "How the question, the prompt's last part, is attended: as the rest of the prompt, densely, \
                                or by the decode method.",
                "enum": ["prefill", "dense", "decode"],
            },
            "question_tokens": {
                "description": "How many tokens of the prompt's end the question is; absent, it begins with the last \
                                user message.",
                "type": "integer", "minimum": 1, "maximum": 1_048_576,
            },
            "audit": {
                "description": "The share of tokens whose heads are compared with dense attention in every layer; true for all of them. \
                                A step with such a token is slower. What is attended densely is not compared.",
                "oneOf": [{ "type": "boolean" }, { "type": "number", "minimum": 0, "maximum": 1 }],
            },
            "trace": {
                "description": "Whether `usage.attention.trace` says head by head and token by token what was read.",
                "type": "boolean",
            },
            "speculate": {
                "description": "Drafts, which the request's own decode method checks; null for none. Another decode method makes \
                                them, or they are what followed the answer's last tokens where they stood in the text before.",
                "type": ["object", "null"],
                "properties": {
                    "method": {
                        "description": "The method, or its name; absent where drafts are only looked up.",
                        "oneOf": named("decode"),
                    },
                    "tokens": {
                        "description": "Tokens drafted at a time; of those looked up at most as many as were the same before them.",
                        "type": "integer", "minimum": 1, "maximum": MOST_DRAFTS, "default": 4,
                    },
                    "choose": {
                        "description": "How often drafts choose what they read: every one (`token`), or the first after a check \
                                        (`round`), whose keys those after it read, and all tokens since. Drafts by `santa` \
                                        choose every time.",
                        "enum": ["token", "round"], "default": Choose::default(),
                    },
                    "lookup": {
                        "description": "How many tokens at the answer's end must stand in the prompt or the answer before for \
                                        what followed there to be drafted; 0: nothing is looked up.",
                        "type": "integer", "minimum": 0, "maximum": MOST_LOOKUP, "default": 0,
                    },
                },
                "anyOf": [
                    { "required": ["method"] },
                    { "required": ["lookup"], "properties": { "lookup": { "minimum": 1 } } },
                ],
                "additionalProperties": false,
            },
        },
        "additionalProperties": false,
    })
}

/// The names and the objects of all methods of a phase but those that stand around it: none is its own base.
fn named(phase: &str, methods: &[MethodInfo], around: &[(&str, &str)]) -> Vec<Value> {
    let fits = |m: &&MethodInfo| m.phase == phase && !around.contains(&(m.phase, m.name));
    let names: Vec<&str> = methods.iter().filter(fits).map(|m| m.name).collect();
    let objects = methods.iter().filter(fits).map(|m| method_schema(m, methods, around));
    std::iter::once(json!({ "enum": names })).chain(objects).collect()
}

/// A method's object: its name, its parameters, and nothing else.
fn method_schema(method: &MethodInfo, methods: &[MethodInfo], around: &[(&str, &str)]) -> Value {
    let around = [around, &[(method.phase, method.name)]].concat();
    let mut properties = Map::new();
    properties.insert("method".to_owned(), json!({ "const": method.name }));
    for (name, property) in method.parameters["properties"].as_object().into_iter().flatten() {
        let mut property = property.clone();
        // A parameter that is a method in its turn.
        if let Some(phase) = property["x-method-of"].as_str() {
            property["oneOf"] = Value::from(named(phase, methods, &around));
        }
        properties.insert(name.clone(), property);
    }
    let mut schema = method.parameters.clone();
    schema["type"] = json!("object");
    schema["properties"] = Value::Object(properties);
    schema["required"] = json!(["method"]);
    schema["additionalProperties"] = json!(false);
    schema
}
