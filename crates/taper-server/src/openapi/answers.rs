//! The bodies that answers have, for readers and clients; what is written is written in `answer`, `stream` and so on.

use serde::Serialize;
use serde_json::Value;
use std::collections::BTreeMap;
use taper_attention::AttentionUsage;
use utoipa::ToSchema;

/// Why a request was refused or failed.
#[derive(Serialize, ToSchema)]
pub(crate) struct Failure {
    error: Reason,
}

/// What is wrong, and where.
#[derive(Serialize, ToSchema)]
pub(crate) struct Reason {
    message: String,
    /// vLLM's names, such as `BadRequestError`.
    r#type: String,
    /// The path of the field at fault, such as `attention.decode.epsilon`.
    #[schema(required)]
    param: Option<String>,
    /// The HTTP status.
    code: u16,
}

/// A chat's answer.
#[derive(Serialize, ToSchema)]
pub(crate) struct ChatCompletion {
    id: String,
    /// `chat.completion`
    object: String,
    /// Seconds since 1970.
    created: u64,
    model: String,
    choices: Vec<ChatChoice>,
    usage: Usage,
}

/// One answer of a chat.
#[derive(Serialize, ToSchema)]
pub(crate) struct ChatChoice {
    index: usize,
    message: Answer,
    #[schema(required)]
    finish_reason: Option<FinishReason>,
    /// The string or token that ended it.
    #[schema(required, value_type = Option<StopReason>)]
    stop_reason: Option<Value>,
    #[schema(required)]
    logprobs: Option<ChatLogprobs>,
}

/// Log probabilities of an answer's tokens.
#[derive(Serialize, ToSchema)]
pub(crate) struct ChatLogprobs {
    content: Vec<ChatToken>,
    /// Always null.
    #[schema(required)]
    refusal: Option<String>,
}

/// A token of an answer.
#[derive(Serialize, ToSchema)]
pub(crate) struct ChatToken {
    #[serde(flatten)]
    chosen: ScoredToken,
    /// The most probable tokens at its place, best first.
    top_logprobs: Vec<ScoredToken>,
}

/// A token and its natural log probability, before any penalty, bias or temperature.
#[derive(Serialize, ToSchema)]
pub(crate) struct ScoredToken {
    token: String,
    logprob: f32,
    /// UTF-8; one token may be a part of a character.
    bytes: Vec<u8>,
}

/// What the assistant says.
#[derive(Serialize, ToSchema)]
pub(crate) struct Answer {
    /// `assistant`
    role: String,
    /// None where functions are called and nothing is said.
    #[schema(required)]
    content: Option<String>,
    tool_calls: Option<Vec<ToolCall>>,
}

/// A call of a function.
#[derive(Serialize, ToSchema)]
pub(crate) struct ToolCall {
    id: String,
    /// `function`
    r#type: String,
    function: CalledFunction,
}

/// Which function, with what.
#[derive(Serialize, ToSchema)]
pub(crate) struct CalledFunction {
    name: String,
    /// JSON as text.
    arguments: String,
}

/// Why an answer ended.
#[derive(Serialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub(crate) enum FinishReason {
    Stop,
    Length,
    ToolCalls,
}

/// The string or token that ended an answer.
#[derive(Serialize, ToSchema)]
#[serde(untagged)]
pub(crate) enum StopReason {
    String(String),
    Token(u32),
}

/// One event of a chat's stream.
#[derive(Serialize, ToSchema)]
pub(crate) struct ChatEvent {
    /// A chunk in JSON, or the failure that ended the answer; the last event's is `[DONE]`.
    data: ChatChunk,
}

/// One event of a text completion's stream.
#[derive(Serialize, ToSchema)]
pub(crate) struct TextEvent {
    /// A chunk in JSON, or the failure that ended the answer; the last event's is `[DONE]`.
    data: TextCompletion,
}

/// One event of a response's stream.
#[derive(Serialize, ToSchema)]
pub(crate) struct ResponseEvent {
    /// What happened, such as `response.output_text.delta`.
    event: String,
    /// The same under `type`, a `sequence_number`, and what is new, in JSON.
    #[schema(value_type = Object)]
    data: Value,
}

/// What is new of a chat's answers.
#[derive(Serialize, ToSchema)]
pub(crate) struct ChatChunk {
    id: String,
    /// `chat.completion.chunk`
    object: String,
    created: u64,
    model: String,
    /// Empty in the chunk that has the usage.
    choices: Vec<ChunkChoice>,
    usage: Option<Usage>,
}

/// What is new of one answer.
#[derive(Serialize, ToSchema)]
pub(crate) struct ChunkChoice {
    index: usize,
    /// `role`, `content`, `tool_calls`, as far as there is something new.
    #[schema(value_type = Object)]
    delta: Value,
    #[schema(required)]
    finish_reason: Option<FinishReason>,
    #[schema(required, value_type = Option<StopReason>)]
    stop_reason: Option<Value>,
    #[schema(required)]
    logprobs: Option<ChatLogprobs>,
}

/// Texts that go on.
#[derive(Serialize, ToSchema)]
pub(crate) struct TextCompletion {
    id: String,
    /// `text_completion`
    object: String,
    created: u64,
    model: String,
    choices: Vec<TextChoice>,
    usage: Option<Usage>,
}

/// One of them; those of the first prompt come first.
#[derive(Serialize, ToSchema)]
pub(crate) struct TextChoice {
    index: usize,
    text: String,
    #[schema(required)]
    finish_reason: Option<FinishReason>,
    #[schema(required, value_type = Option<StopReason>)]
    stop_reason: Option<Value>,
    #[schema(required)]
    logprobs: Option<TextLogprobs>,
}

/// Log probabilities of a text's tokens, an echoed prompt's first: lists of one length.
#[derive(Serialize, ToSchema)]
pub(crate) struct TextLogprobs {
    tokens: Vec<String>,
    /// None for a prompt's first token, which comes after nothing.
    token_logprobs: Vec<Option<f32>>,
    /// The most probable tokens at each place.
    top_logprobs: Vec<Option<BTreeMap<String, f32>>>,
    /// Characters of the text before each.
    text_offset: Vec<usize>,
}

/// An answer of the newer API.
#[derive(Serialize, ToSchema)]
pub(crate) struct ResponseAnswer {
    id: String,
    /// `response`
    object: String,
    created_at: u64,
    /// `completed`, `incomplete` where its length ended it, or in a stream `failed`, with the output that there was.
    status: String,
    model: String,
    output: Vec<OutputItem>,
    #[schema(required)]
    error: Option<ResponseError>,
    #[schema(required)]
    incomplete_details: Option<Incomplete>,
    /// None in the events before the last, and where it failed.
    #[schema(required)]
    usage: Option<ResponseUsage>,
    /// Always false.
    background: bool,
    /// Always false: nothing is stored.
    store: bool,
    /// Always null.
    #[schema(required)]
    previous_response_id: Option<String>,
    /// `disabled`
    truncation: String,
    /// These are the request's.
    #[schema(required)]
    instructions: Option<String>,
    #[schema(required)]
    max_output_tokens: Option<i64>,
    #[schema(value_type = Object)]
    metadata: Value,
    parallel_tool_calls: bool,
    temperature: f32,
    top_p: f32,
    #[schema(value_type = Object)]
    text: Value,
    #[schema(value_type = super::requests::Choice)]
    tool_choice: Value,
    #[schema(value_type = Vec<Object>)]
    tools: Vec<Value>,
}

/// A message, or a call of a function.
#[derive(Serialize, ToSchema)]
#[serde(tag = "type", rename_all = "snake_case")]
pub(crate) enum OutputItem {
    Message {
        id: String,
        /// `in_progress`, `completed` or `incomplete`
        status: String,
        /// `assistant`
        role: String,
        content: Vec<OutputText>,
    },
    FunctionCall {
        id: String,
        call_id: String,
        status: String,
        name: String,
        /// JSON as text.
        arguments: String,
    },
}

/// Text of a message.
#[derive(Serialize, ToSchema)]
pub(crate) struct OutputText {
    /// `output_text`
    r#type: String,
    text: String,
    /// Always empty.
    #[schema(value_type = Vec<Object>)]
    annotations: Vec<Value>,
    /// Its tokens, where `include` or `top_logprobs` asks for their log probabilities.
    logprobs: Vec<ChatToken>,
}

/// Why a response failed after it had begun.
#[derive(Serialize, ToSchema)]
pub(crate) struct ResponseError {
    /// `server_error` or `invalid_prompt`
    code: String,
    message: String,
}

/// Why a response is not whole.
#[derive(Serialize, ToSchema)]
pub(crate) struct Incomplete {
    /// `max_output_tokens`
    reason: String,
}

/// Tokens, and what attention did.
#[derive(Serialize, ToSchema)]
pub(crate) struct ResponseUsage {
    input_tokens: usize,
    input_tokens_details: PromptDetails,
    output_tokens: usize,
    output_tokens_details: OutputDetails,
    total_tokens: usize,
    attention: RequestAttention,
}

/// What of an answer is not shown.
#[derive(Serialize, ToSchema)]
pub(crate) struct OutputDetails {
    /// Always 0.
    reasoning_tokens: usize,
}

/// What was embedded, written from numbers as they are: as JSON values they would take many times their room.
#[derive(Serialize, ToSchema)]
pub(crate) struct Embeddings {
    /// `list`
    pub(crate) object: &'static str,
    pub(crate) model: String,
    pub(crate) data: Vec<Embedding>,
    #[schema(value_type = EmbeddingUsage)]
    pub(crate) usage: Value,
}

/// Tokens, and what attention did.
#[derive(Serialize, ToSchema)]
pub(crate) struct EmbeddingUsage {
    prompt_tokens: usize,
    total_tokens: usize,
    prompt_tokens_details: PromptDetails,
    attention: RequestAttention,
}

/// One text's.
#[derive(Serialize, ToSchema)]
pub(crate) struct Embedding {
    /// `embedding`
    pub(crate) object: &'static str,
    pub(crate) index: usize,
    /// Of length 1.
    pub(crate) embedding: Numbers,
}

/// Numbers, or the same in base64.
#[derive(Serialize, ToSchema)]
#[serde(untagged)]
pub(crate) enum Numbers {
    Plain(Vec<f32>),
    Base64(String),
}

/// Tokens, and what attention did.
#[derive(Serialize, ToSchema)]
pub(crate) struct Usage {
    prompt_tokens: usize,
    completion_tokens: usize,
    total_tokens: usize,
    prompt_tokens_details: PromptDetails,
    /// The first choice's; of several, all are listed under `choices`.
    attention: RequestAttention,
}

/// What of the prompt was there already.
#[derive(Serialize, ToSchema)]
pub(crate) struct PromptDetails {
    /// Tokens whose keys and values another prompt left in the cache.
    cached_tokens: usize,
}

/// What attention did for a request.
#[derive(Serialize, ToSchema)]
pub(crate) struct RequestAttention {
    #[serde(flatten)]
    first: AttentionUsage,
    /// All choices' usage, of several; traces are here alone then.
    choices: Option<Vec<AttentionUsage>>,
}

/// The models served: one.
#[derive(Serialize, ToSchema)]
pub(crate) struct Models {
    /// `list`
    object: String,
    data: Vec<Model>,
}

/// A model.
#[derive(Serialize, ToSchema)]
pub(crate) struct Model {
    id: String,
    /// `model`
    object: String,
    created: u64,
    owned_by: String,
    /// Tokens of prompt and answer together.
    max_model_len: usize,
}

/// Tokens of a text.
#[derive(Serialize, ToSchema)]
pub(crate) struct Tokens {
    count: usize,
    max_model_len: usize,
    tokens: Vec<u32>,
    #[schema(required)]
    token_strs: Option<Vec<String>>,
}

/// The text of tokens.
#[derive(Serialize, ToSchema)]
pub(crate) struct Prompt {
    prompt: String,
}

/// How busy the server is.
#[derive(Serialize, ToSchema)]
pub(crate) struct Ready {
    waiting: usize,
    running: usize,
    cache_tokens: usize,
    offloaded_tokens: usize,
}

/// The program's version.
#[derive(Serialize, ToSchema)]
pub(crate) struct Version {
    version: String,
}
