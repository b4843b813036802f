//! `/openapi.json`: what the endpoints take and answer, from the types here and what stands at each handler.

// Nothing makes these, but for an embedding's answer: their derives alone are wanted.
#[allow(dead_code)]
pub(crate) mod answers;
#[allow(dead_code)]
pub(crate) mod requests;

use crate::usage;
use axum::Json;
use serde_json::{Value, json};
use taper_attention::AttentionSpec;
use utoipa::openapi::security::{HttpAuthScheme, HttpBuilder, SecurityRequirement, SecurityScheme};
use utoipa::openapi::{Components, Info, OpenApi, OpenApiBuilder};

/// Stands for the schema of `attention`, which comes from the methods' own parameters.
#[derive(utoipa::ToSchema)]
#[allow(dead_code)]
pub(crate) struct Attention {}

/// What is said of all of it.
pub(crate) fn about() -> OpenApi {
    let mut info = Info::new("Taper", env!("CARGO_PKG_VERSION"));
    info.description = Some(
        "LLM inference whose attention is a request parameter. Every `POST`, and everything under `/v1`, needs a key where the \
         server has keys. Fields that are not known here are named in the header `x-taper-ignored-fields`, but a misspelt knob of \
         attention is refused."
            .into(),
    );
    let mut components = Components::new();
    let key = HttpBuilder::new().scheme(HttpAuthScheme::Bearer).description(Some("An API key.")).build();
    components.add_security_scheme("key", SecurityScheme::Http(key));
    let keys = [SecurityRequirement::default(), SecurityRequirement::new("key", [""; 0])];
    OpenApiBuilder::new().info(info).components(Some(components)).security(Some(keys)).build()
}

/// The document, with the attention methods of this build in it.
pub(crate) fn document(document: OpenApi) -> Json<Value> {
    let mut document = json!(document);
    let mut attention = AttentionSpec::default().document(0);
    let name = json!({"type": "string", "description": "A preset's name, or that of a method, which goes by its defaults: of one for prompts and answers, answers by it."});
    document["components"]["schemas"]["Attention"] = json!({"oneOf": [attention["schema"].take(), name]});
    usage::describe(&mut document["components"]["schemas"]["PhaseUsage"]);
    // An event's data is JSON as text; what OpenAI streamed first ends with a word that is none, and may tell of a failure.
    let text = |content| json!({"type": "string", "contentMediaType": "application/json", "contentSchema": content});
    for event in ["ChatEvent", "TextEvent", "ResponseEvent"] {
        let data = &mut document["components"]["schemas"][event]["properties"]["data"];
        let content = data.take();
        *data = if event == "ResponseEvent" {
            text(content)
        } else {
            let failure = json!({"$ref": "#/components/schemas/Failure"});
            json!({"anyOf": [{"const": "[DONE]"}, text(json!({"anyOf": [content, failure]}))]})
        };
    }
    // A name may have slashes, for which a path here has no words.
    if let Some(paths) = document["paths"].as_object_mut() {
        *paths = std::mem::take(paths).into_iter().map(|(path, about)| (path.replace("{*", "{"), about)).collect();
    }
    Json(document)
}
