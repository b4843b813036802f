//! The bodies that requests may have, for readers and clients; what is read is read in `chat`, `completions` and so on.

use serde::Serialize;
use serde_json::Value;
use std::collections::BTreeMap;
use utoipa::ToSchema;

/// What chat and text completions have alike.
#[derive(Serialize, ToSchema)]
pub(crate) struct Common {
    /// One of the model's names; there is one model, and it need not be named.
    model: Option<String>,
    #[serde(flatten)]
    attention: Attending,
    #[serde(flatten)]
    drawing: Drawing,
    /// Answers to each prompt.
    #[schema(minimum = 1, maximum = 32, default = 1)]
    n: Option<i64>,
    /// Whether the answer comes as it is made, as server-sent events.
    #[schema(default = false)]
    stream: Option<bool>,
    /// Needs `stream`.
    stream_options: Option<StreamOptions>,
    /// What the answer must be.
    response_format: Option<ResponseFormat>,
    /// The same in vLLM's terms.
    structured_outputs: Option<StructuredOutputs>,
}

/// How tokens are drawn, when an answer ends, and when it comes; every endpoint that answers has these.
#[derive(Serialize, ToSchema)]
pub(crate) struct Drawing {
    /// Randomness of the draws; 0 always takes the most probable token. Where the model's
    /// generation_config.json says another default, that holds.
    #[schema(minimum = 0, maximum = 2, default = 1)]
    temperature: Option<f32>,
    /// Draws from the most probable tokens up to this sum of probabilities. Without it as `temperature`.
    #[schema(exclusive_minimum = 0, maximum = 1, default = 1)]
    top_p: Option<f32>,
    /// Draws from so many of the most probable tokens; 0 and -1 are all. Without it as `temperature`.
    #[schema(minimum = -1, default = 0)]
    top_k: Option<i64>,
    /// Draws from tokens at least this share as probable as the most probable one. Without it as `temperature`.
    #[schema(minimum = 0, maximum = 1, default = 0)]
    min_p: Option<f32>,
    /// What tokens that stand in the answer lose of their logit.
    #[schema(minimum = -2, maximum = 2, default = 0)]
    presence_penalty: Option<f32>,
    /// What they lose for each time that they stand there.
    #[schema(minimum = -2, maximum = 2, default = 0)]
    frequency_penalty: Option<f32>,
    /// What logits of tokens in prompt and answer are divided by (multiplied, below 0). Without it as `temperature`.
    #[schema(minimum = 0.01, maximum = 10, default = 1)]
    repetition_penalty: Option<f32>,
    /// Seed of all draws, the sampler's and attention's: an integer of 64 bits, signed or not. Without it, or by -1 (2^64 - 1 is the same), a new one for
    /// each prompt, or at temperature 0 one that the prompts decide, which the usage tells.
    seed: Option<i64>,
    /// Added to the logits of tokens, by id; each from -100 to 100.
    #[schema(value_type = Option<BTreeMap<String, f32>>)]
    logit_bias: Option<BTreeMap<String, f32>>,
    /// The only tokens that may come, by id; with end tokens only if they are named.
    #[schema(value_type = Option<Vec<u32>>, min_items = 1)]
    allowed_token_ids: Option<Vec<u32>>,
    /// Words that do not come, up to 1,000 of 200 characters, in the tokens that they have at a text's beginning and
    /// after a space.
    #[schema(value_type = Option<Vec<String>>, max_items = 1000)]
    bad_words: Option<Vec<String>>,
    /// Tokens before which an answer does not end.
    #[schema(minimum = 0, default = 0)]
    min_tokens: Option<i64>,
    /// Where an answer ends: a string, or up to 16; none is part of it.
    stop: Option<Strings>,
    /// Whether the string, or the token of `stop_token_ids`, that ended an answer stands at its end nonetheless.
    #[schema(default = false)]
    include_stop_str_in_output: Option<bool>,
    /// Tokens that end an answer.
    #[schema(value_type = Option<Vec<u32>>)]
    stop_token_ids: Option<Vec<u32>>,
    /// Goes on where the model would end.
    #[schema(default = false)]
    ignore_eos: Option<bool>,
    /// Whether the model's own marks between texts are left out.
    #[schema(default = true)]
    skip_special_tokens: Option<bool>,
    /// Requests with less of it go before those with more; the server says how little one may have, 0 by default. The header
    /// `X-Vllm-Priority` goes over it.
    #[schema(default = 0)]
    priority: Option<i64>,
    /// Seconds that the request may take, waiting included; then it ends with a 504.
    #[schema(exclusive_minimum = 0)]
    timeout: Option<f32>,
}

/// How a request is attended; every endpoint that runs the model has these.
#[derive(Serialize, ToSchema)]
pub(crate) struct Attending {
    /// Methods for prompt and answer, with their parameters.
    #[schema(value_type = Option<super::Attention>)]
    attention: Option<Value>,
    /// Short for vAttention: relative error that its output may have.
    #[schema(exclusive_minimum = 0, exclusive_maximum = 1)]
    epsilon: Option<f64>,
    /// Short for vAttention: probability of an error beyond `epsilon`.
    #[schema(exclusive_minimum = 0, exclusive_maximum = 1)]
    delta: Option<f64>,
    /// Short for Delta Attention: one row in so many is attended densely.
    #[schema(minimum = 1)]
    gamma: Option<i64>,
    /// The same as flat keys, such as `attention_epsilon` or `attention_decode_method`, for gateways that pass only scalars on.
    #[schema(value_type = Option<Object>)]
    vllm_xargs: Option<Value>,
    /// Keeps the prompt's keys and values for requests with the same salt: how fast an answer comes, and how much of
    /// its prompt was cached, tells nobody else what was asked. Best long and random.
    #[schema(value_type = Option<String>, min_length = 1, max_length = 1024)]
    cache_salt: Option<String>,
}

/// `POST /v1/chat/completions`
#[derive(Serialize, ToSchema)]
pub(crate) struct ChatRequest {
    #[serde(flatten)]
    common: Common,
    /// The conversation so far.
    #[schema(min_items = 1)]
    messages: Vec<Message>,
    /// Most tokens of an answer; if nothing is said as many as fit, or as the model's generation_config.json has it.
    #[schema(minimum = 1)]
    max_tokens: Option<i64>,
    /// The same by its newer name, which goes first.
    #[schema(minimum = 1)]
    max_completion_tokens: Option<i64>,
    /// Functions that the answer may call.
    tools: Option<Vec<Tool>>,
    /// `none`, `auto`, `required`, `{"type": "function", "function": {"name": …}}`, or of some of the functions alone
    /// `{"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [{"type": "function", "function": {"name": …}}]}}`,
    /// where `mode` may be `required`.
    #[schema(value_type = Option<Choice>)]
    tool_choice: Option<Value>,
    /// Whether an answer may have more than one call.
    #[schema(default = true)]
    parallel_tool_calls: Option<bool>,
    /// Variables for the model's chat template.
    #[schema(value_type = Option<Object>)]
    chat_template_kwargs: Option<Value>,
    /// Whether the answer goes on with the last message, which is the assistant's, instead of being a reply.
    #[schema(default = false)]
    continue_final_message: Option<bool>,
    /// False only beside `continue_final_message`, with which it may not be true.
    add_generation_prompt: Option<bool>,
    /// Whether tokens come with their log probabilities.
    #[schema(default = false)]
    logprobs: Option<bool>,
    /// How many of the most probable tokens come beside each; needs `logprobs`.
    #[schema(minimum = 0, maximum = 20, default = 0)]
    top_logprobs: Option<i64>,
}

/// `POST /v1/completions`
#[derive(Serialize, ToSchema)]
pub(crate) struct TextRequest {
    #[serde(flatten)]
    common: Common,
    /// What is continued, up to 64 texts.
    prompt: Texts,
    /// Whether texts get the marks that the model wants at their start.
    #[schema(default = true)]
    add_special_tokens: Option<bool>,
    /// Most tokens of an answer, 16 or fewer (by the model's generation_config.json) if nothing is said; 0 with `echo` alone.
    #[schema(minimum = 0, default = 16)]
    max_tokens: Option<i64>,
    /// The same by its newer name, which goes first.
    #[schema(minimum = 0)]
    max_completion_tokens: Option<i64>,
    /// How many of the most probable tokens come beside each; 0 gives the tokens' own log probabilities alone.
    #[schema(minimum = 0, maximum = 20)]
    logprobs: Option<i64>,
    /// Whether the prompt comes before the answer; with `logprobs`, its tokens' as well, up to 262,144 log probabilities in one
    /// answer (prompt tokens, times `logprobs` + 1, times `n`). `max_tokens` may be 0 then.
    #[schema(default = false)]
    echo: Option<bool>,
    /// Answers drawn, at least `n`: the `n` whose tokens have the highest mean log probability come, the best first. More than
    /// `n` are not streamed.
    #[schema(minimum = 1, maximum = 32)]
    best_of: Option<i64>,
}

/// `POST /v1/responses`: the text part of OpenAI's newer API. Nothing is stored, so that the conversation comes whole with each
/// request. Sampling and attention are said as in a chat.
#[derive(Serialize, ToSchema)]
pub(crate) struct ResponseRequest {
    /// One of the model's names; there is one model, and it need not be named.
    model: Option<String>,
    #[serde(flatten)]
    attention: Attending,
    #[serde(flatten)]
    drawing: Drawing,
    /// A user's message, or items of a conversation: messages, calls of functions and their results.
    #[schema(value_type = Input)]
    input: Value,
    /// A system message before it.
    instructions: Option<String>,
    /// Most tokens of the answer.
    #[schema(minimum = 1)]
    max_output_tokens: Option<i64>,
    /// Functions that the answer may call: a chat's, without an object of its own around the function.
    #[schema(value_type = Option<Vec<Object>>)]
    tools: Option<Value>,
    /// `none`, `auto`, `required`, `{"type": "function", "name": …}`, or of some of the functions alone
    /// `{"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": …}]}`, where `mode` may be `required`.
    #[schema(value_type = Option<Choice>)]
    tool_choice: Option<Value>,
    /// Whether an answer may have more than one call.
    #[schema(default = true)]
    parallel_tool_calls: Option<bool>,
    /// `{"format": …}`: what the answer must be.
    #[schema(value_type = Option<Object>)]
    text: Option<Value>,
    /// The same in vLLM's terms.
    structured_outputs: Option<StructuredOutputs>,
    /// Variables for the model's chat template.
    #[schema(value_type = Option<Object>)]
    chat_template_kwargs: Option<Value>,
    /// Whether the answer goes on with the last message, which is the assistant's, instead of being a reply.
    #[schema(default = false)]
    continue_final_message: Option<bool>,
    /// False only beside `continue_final_message`, with which it may not be true.
    add_generation_prompt: Option<bool>,
    /// Answers: one.
    #[schema(minimum = 1, maximum = 1, default = 1)]
    n: Option<i64>,
    /// What comes back with the answer.
    #[schema(value_type = Option<Object>)]
    metadata: Option<Value>,
    /// Whether the answer is to be kept: it never is.
    store: Option<bool>,
    /// What is to become of an input that is too long: it is refused, whatever is said here.
    truncation: Option<Truncation>,
    /// `message.output_text.logprobs` for the tokens' log probabilities.
    #[schema(value_type = Option<Vec<String>>)]
    include: Option<Vec<String>>,
    /// How many of the most probable tokens come beside each; more than none brings log probabilities with it.
    #[schema(minimum = 0, maximum = 20)]
    top_logprobs: Option<i64>,
    /// Whether the answer comes as it is made, as events.
    #[schema(default = false)]
    stream: Option<bool>,
    /// Needs `stream`; the last event has the usage, whatever is said here.
    stream_options: Option<StreamOptions>,
}

/// What OpenAI does with an input that is too long.
#[derive(Serialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Truncation {
    Auto,
    Disabled,
}

/// `POST /v1/embeddings`
#[derive(Serialize, ToSchema)]
pub(crate) struct EmbeddingRequest {
    /// One of the model's names; there is one model, and it need not be named.
    model: Option<String>,
    #[serde(flatten)]
    attention: Attending,
    /// What is embedded, up to 2,048 texts.
    input: Texts,
    /// Whether texts get the marks that the model wants at their start.
    #[schema(default = true)]
    add_special_tokens: Option<bool>,
    /// The model's own number of them, if it is said at all.
    #[schema(minimum = 1)]
    dimensions: Option<i64>,
    /// Seconds that the request may take, waiting included; then it ends with a 504.
    #[schema(exclusive_minimum = 0)]
    timeout: Option<f32>,
    /// Requests with less of it go before those with more.
    #[schema(default = 0)]
    priority: Option<i64>,
    /// Whether numbers come as such, or as little-endian f32 in base64.
    #[schema(default = "float")]
    encoding_format: Option<Encoding>,
}

/// How numbers are written.
#[derive(Serialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Encoding {
    Float,
    Base64,
}

/// `POST /tokenize`: a prompt, or messages as a chat has them.
#[derive(Serialize, ToSchema)]
pub(crate) struct TokenizeRequest {
    /// One of the model's names; there is one model, and it need not be named.
    model: Option<String>,
    /// A text.
    prompt: Option<String>,
    /// A conversation.
    messages: Option<Vec<Message>>,
    /// Whether it is made ready for the assistant's answer.
    #[schema(default = true)]
    add_generation_prompt: Option<bool>,
    /// Functions that the answer may call.
    tools: Option<Vec<Tool>>,
    /// As in a chat: it changes none of the tokens.
    #[schema(value_type = Option<Choice>)]
    tool_choice: Option<Value>,
    /// As in a chat.
    #[schema(default = true)]
    parallel_tool_calls: Option<bool>,
    /// Whether a text begins as the model's texts do.
    #[schema(default = true)]
    add_special_tokens: Option<bool>,
    /// Whether the tokens come as text too.
    #[schema(default = false)]
    return_token_strs: Option<bool>,
    /// Variables for the model's chat template.
    #[schema(value_type = Option<Object>)]
    chat_template_kwargs: Option<Value>,
    /// Whether an answer would go on with the last message, which is the assistant's, instead of being a reply.
    #[schema(default = false)]
    continue_final_message: Option<bool>,
}

/// `POST /detokenize`
#[derive(Serialize, ToSchema)]
pub(crate) struct DetokenizeRequest {
    /// One of the model's names; there is one model, and it need not be named.
    model: Option<String>,
    /// Token ids.
    tokens: Vec<u32>,
}

/// A string, or several.
#[derive(Serialize, ToSchema)]
#[serde(untagged)]
pub(crate) enum Strings {
    One(String),
    Several(Vec<String>),
}

/// A text, token ids, or several of either.
#[derive(Serialize, ToSchema)]
#[serde(untagged)]
pub(crate) enum Texts {
    One(String),
    Several(Vec<String>),
    Tokens(Vec<u32>),
    Batch(Vec<Vec<u32>>),
}

/// A user's message, or items of a conversation.
#[derive(Serialize, ToSchema)]
#[serde(untagged)]
pub(crate) enum Input {
    Text(String),
    #[schema(value_type = Vec<Object>)]
    Items(Vec<Value>),
}

/// A word, or more in an object.
#[derive(Serialize, ToSchema)]
#[serde(untagged)]
pub(crate) enum Choice {
    Word(String),
    #[schema(value_type = Object)]
    Object(Value),
}

/// One message of a conversation.
#[derive(Serialize, ToSchema)]
pub(crate) struct Message {
    /// `system`, `user`, `assistant`, `tool`: what the model's template knows.
    #[schema(min_length = 1)]
    role: String,
    /// Text, or parts `{"type": "text", "text": …}` and `{"type": "refusal", "refusal": …}`; an assistant's that calls functions needs none.
    #[schema(value_type = Option<Content>)]
    content: Option<Value>,
    /// Who speaks.
    name: Option<String>,
    /// Functions that the assistant called.
    #[schema(value_type = Option<Vec<super::answers::ToolCall>>)]
    tool_calls: Option<Value>,
    /// Which call a tool's message answers.
    tool_call_id: Option<String>,
}

/// Text, or parts of it.
#[derive(Serialize, ToSchema)]
#[serde(untagged)]
pub(crate) enum Content {
    Text(String),
    Parts(Vec<Part>),
}

/// A part of a message: text, or what an earlier answer said in refusing.
#[derive(Serialize, ToSchema)]
#[serde(tag = "type", rename_all = "lowercase")]
pub(crate) enum Part {
    Text { text: String },
    Refusal { refusal: String },
}

/// A function that an answer may call.
#[derive(Serialize, ToSchema)]
pub(crate) struct Tool {
    r#type: ToolKind,
    function: Function,
}

/// The one kind of tool there is.
#[derive(Serialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub(crate) enum ToolKind {
    Function,
}

/// A function's name and arguments.
#[derive(Serialize, ToSchema)]
pub(crate) struct Function {
    /// Letters, digits, `_`, `-` and `.`, up to 64.
    #[schema(pattern = "^[A-Za-z0-9_.-]{1,64}$")]
    name: String,
    description: Option<String>,
    /// JSON Schema of its arguments, an object.
    #[schema(value_type = Option<Object>)]
    parameters: Option<Value>,
}

/// How a stream ends.
#[derive(Serialize, ToSchema)]
pub(crate) struct StreamOptions {
    /// Whether a last chunk has the usage.
    #[schema(default = false)]
    include_usage: Option<bool>,
}

/// What an answer must be, in OpenAI's terms.
#[derive(Serialize, ToSchema)]
#[serde(tag = "type", rename_all = "snake_case")]
pub(crate) enum ResponseFormat {
    Text,
    JsonObject {
        /// A JSON schema, as llama.cpp takes one here.
        #[schema(value_type = Option<Object>)]
        schema: Option<Value>,
    },
    JsonSchema {
        /// `{"name": …, "schema": …}`
        #[schema(value_type = Object)]
        json_schema: Value,
    },
}

/// What an answer must be, in vLLM's terms: exactly one of `json`, `json_object`, `regex`, `choice`, `grammar`.
#[derive(Serialize, ToSchema)]
pub(crate) struct StructuredOutputs {
    /// A JSON schema, as an object or as text.
    #[schema(value_type = Option<Choice>)]
    json: Option<Value>,
    /// Any JSON object.
    json_object: Option<bool>,
    /// A regular expression that all of the answer matches.
    regex: Option<String>,
    /// One of these texts.
    choice: Option<Vec<String>>,
    /// A grammar in Lark's format, whose first rule is `start`.
    grammar: Option<String>,
    /// Whether JSON has no spaces between its parts.
    disable_any_whitespace: Option<bool>,
    /// A regular expression of the spaces between its parts; otherwise there is at most one space, or a line's end and
    /// 20 spaces or tabs.
    whitespace_pattern: Option<String>,
}
