//! The bodies that answers have, for readers and clients; what is written is written in `answer`, `stream` and so on.

use serde::Serialize;
use serde_json::Value;
use std::collections::BTreeMap;
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
    /// Of OpenAI's form for chats.
    #[schema(required, value_type = Option<Object>)]
    logprobs: Option<Value>,
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
    /// A chunk in JSON; the last event's is `[DONE]`.
    data: ChatChunk,
}

/// One event of a text completion's stream.
#[derive(Serialize, ToSchema)]
pub(crate) struct TextEvent {
    /// A chunk in JSON; the last event's is `[DONE]`.
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
    #[schema(required, value_type = Option<Object>)]
    logprobs: Option<Value>,
}

/// An answer of the newer API.
#[derive(Serialize, ToSchema)]
pub(crate) struct ResponseAnswer {
    id: String,
    /// `response`
    object: String,
    created_at: u64,
    /// `completed`, or `incomplete` where its length ended it.
    status: String,
    model: String,
    /// Messages and calls of functions.
    #[schema(value_type = Vec<Object>)]
    output: Vec<Value>,
    #[schema(value_type = Object)]
    usage: Value,
}

/// What was embedded.
#[derive(Serialize, ToSchema)]
pub(crate) struct Embeddings {
    /// `list`
    object: String,
    model: String,
    data: Vec<Embedding>,
    #[schema(value_type = Object)]
    usage: Value,
}

/// One text's.
#[derive(Serialize, ToSchema)]
pub(crate) struct Embedding {
    /// `embedding`
    object: String,
    index: usize,
    /// Of length 1.
    embedding: Numbers,
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
    attention: AttentionUsage,
}

/// What of the prompt was there already.
#[derive(Serialize, ToSchema)]
pub(crate) struct PromptDetails {
    /// Tokens whose keys and values another prompt left in the cache.
    cached_tokens: usize,
}

/// What attention did for a request.
#[derive(Serialize, ToSchema)]
pub(crate) struct AttentionUsage {
    prefill: PhaseUsage,
    decode: PhaseUsage,
    /// Drafts, where the request wants some: `drafted`, `accepted`, `acceptance`, and the `draft`s' own attention.
    #[schema(value_type = Option<Object>)]
    speculation: Option<Value>,
    /// Head by head and token by token, where `attention.trace` asks for it.
    trace: Option<Trace>,
    /// All choices' usage, of several.
    #[schema(value_type = Option<Vec<Object>>)]
    choices: Option<Vec<Value>>,
}

/// One phase.
#[derive(Serialize, ToSchema)]
pub(crate) struct PhaseUsage {
    method: String,
    /// Share of (query, key) pairs attended to.
    #[schema(minimum = 0, maximum = 1)]
    density: f64,
    /// Keys, or what stands for some, that were scored to choose what is read, as a share of the pairs.
    scored: Option<f64>,
    /// Keys read per query, layer and KV head, on average.
    budget_mean: f64,
    /// The most keys that one query read in one layer and KV head.
    budget_max: u64,
    /// Seed of the method's draws; a request with it draws the same.
    seed: i64,
    /// Query heads that read everything to keep a promise.
    dense_heads: Option<u64>,
    /// Attention mass kept, as the method measured it: `mean` and `min`.
    cra: Option<BTreeMap<String, f64>>,
    /// Relative errors against dense attention: `heads`, `error_mean`, `error_p99`, `error_max`, `over_epsilon`, the share of
    /// heads that broke their promise, and `delta`, what it is promised to be at most.
    audit: Option<BTreeMap<String, f64>>,
}

/// What attention did, head by head and token by token.
#[derive(Serialize, ToSchema)]
pub(crate) struct Trace {
    layers: usize,
    kv_heads: usize,
    /// None where no row of the prompt was computed.
    #[schema(required)]
    prefill: Option<HeadTrace>,
    /// None where the decode method attended for nothing.
    #[schema(required)]
    decode: Option<HeadTrace>,
    /// The first 1,024 tokens that the decode method attended for.
    tokens: Vec<TokenTrace>,
}

/// One phase.
#[derive(Serialize, ToSchema)]
pub(crate) struct HeadTrace {
    /// Share of (query, key) pairs read, by layer and KV head.
    density: Vec<Vec<f32>>,
}

/// One token, which made the one after it.
#[derive(Serialize, ToSchema)]
pub(crate) struct TokenTrace {
    position: usize,
    /// Keys read, on average over layers and KV heads.
    budget: f32,
    density: f32,
    /// Mean relative error of audited heads.
    error: Option<f32>,
    /// Runs of keys: first position, keys, by how many (layer, KV head) pairs each is read.
    reads: Option<Vec<Vec<u32>>>,
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
