//! `/tokenize` and `/detokenize`, in vLLM's format.

use crate::app::App;
use crate::chat::Conversation;
use crate::error::{self, ApiError};
use crate::fields::Fields;
use crate::tools::Tools;
use crate::{knobs, sampling};
use serde_json::{Map, Value, json};

/// The tokens of a prompt, or of messages as a chat request would have them.
pub(crate) fn tokenize(app: &App, map: &Map<String, Value>) -> Result<Value, ApiError> {
    let mut fields = Fields::new(map, "");
    app.check_model(fields.text("model")?)?;
    let names = fields.bool("return_token_strs")?.unwrap_or(false);
    // How a prompt is attended changes none of its tokens.
    for knob in knobs::KNOBS {
        fields.get(knob);
    }
    let prompt = fields.text("prompt")?;
    // Of messages' tokens the template says what stands before them.
    let special = fields.bool("add_special_tokens")?.unwrap_or(true);
    let text = app.engine.text();
    let tokens = match (prompt, fields.get("messages").is_some()) {
        (Some(prompt), false) => {
            knobs::unknown(map, fields.unread())?;
            text.encode(prompt, special).map_err(|e| error::text(&e, "prompt"))?
        }
        (None, true) => {
            let ready = fields.bool("add_generation_prompt")?.unwrap_or(true);
            let tools = Tools::read(&mut fields)?;
            let conversation = Conversation::read(&mut fields, tools.as_ref())?;
            knobs::unknown(map, fields.unread())?;
            if ready || conversation.open { conversation.tokens(text)? } else { conversation.turns(text)? }
        }
        _ => return Err(ApiError::invalid("prompt", "either prompt or messages must be there, and not both")),
    };
    let name = |token: &u32| String::from_utf8_lossy(&text.token_bytes(*token)).into_owned();
    Ok(json!({
        "count": tokens.len(),
        "max_model_len": app.engine.limits().context_tokens,
        "token_strs": names.then(|| tokens.iter().map(name).collect::<Vec<_>>()),
        "tokens": tokens,
    }))
}

/// The text of tokens, special ones included.
pub(crate) fn detokenize(app: &App, map: &Map<String, Value>) -> Result<Value, ApiError> {
    let mut fields = Fields::new(map, "");
    app.check_model(fields.text("model")?)?;
    let tokens = fields.array("tokens")?.and_then(|list| sampling::ids(list));
    let tokens = tokens.ok_or_else(|| ApiError::invalid("tokens", "tokens must be an array of token ids"))?;
    tokens.iter().try_for_each(|token| app.check_token(*token, "tokens"))?;
    Ok(json!({"prompt": app.engine.text().decode(&tokens, true)}))
}
