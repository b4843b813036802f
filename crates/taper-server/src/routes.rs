//! The endpoints: one handler each, with what `/openapi.json` says of it.

use crate::app::App;
use crate::body::Body;
use crate::error::{self, ApiError};
use crate::openapi::answers::{
    ChatCompletion, ChatEvent, Embeddings, Failure, Model, Models, Prompt, Ready, ResponseAnswer, ResponseEvent,
    TextCompletion, TextEvent, Tokens, Version,
};
use crate::openapi::requests::{
    ChatRequest, DetokenizeRequest, EmbeddingRequest, ResponseRequest, TextRequest, TokenizeRequest,
};
use crate::request_id::RequestId;
use crate::{chat, completions, embeddings, openapi, page, responses, tokens};
use axum::extract::{Extension, Path, State};
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use axum::{Json, Router};
use serde_json::{Value, json};
use std::sync::Arc;
use taper_engine::{Load, SubmitError};
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

/// All routes, documented or, where a page is meant for people, not.
pub(crate) fn all() -> Router<Arc<App>> {
    let (router, document) = OpenApiRouter::with_openapi(openapi::about())
        .routes(routes!(chat_completions))
        .routes(routes!(text_completions))
        .routes(routes!(respond))
        .routes(routes!(embed))
        .routes(routes!(tokenize))
        .routes(routes!(detokenize))
        .routes(routes!(methods))
        .routes(routes!(models))
        .routes(routes!(model))
        .routes(routes!(health))
        .routes(routes!(ready))
        .routes(routes!(version))
        .routes(routes!(metrics))
        .split_for_parts();
    let document = openapi::document(document);
    router
        .route("/openapi.json", get(async || document))
        .route("/", get(page::index))
        .route("/docs", get(page::docs))
        .route("/page/{name}", get(page::file))
}

/// Answer a chat
#[utoipa::path(post, path = "/v1/chat/completions", tag = "Generate", request_body = ChatRequest,
    responses(
        (status = 200, description = "The answer; with `stream`, its chunks as server-sent events",
            content((ChatCompletion = "application/json"), (ChatEvent = "text/event-stream"))),
        (status = "4XX", description = "Refused", body = Failure), (status = "5XX", description = "Failed", body = Failure)))]
async fn chat_completions(
    State(app): State<Arc<App>>,
    Extension(id): Extension<RequestId>,
    body: Body,
) -> Result<Response, ApiError> {
    let call = body.parse(&app, chat::parse).await?;
    call.run(&app, id).await
}

/// Continue texts
#[utoipa::path(post, path = "/v1/completions", tag = "Generate", request_body = TextRequest,
    responses(
        (status = 200, description = "The texts; with `stream`, their chunks as server-sent events",
            content((TextCompletion = "application/json"), (TextEvent = "text/event-stream"))),
        (status = "4XX", description = "Refused", body = Failure), (status = "5XX", description = "Failed", body = Failure)))]
async fn text_completions(
    State(app): State<Arc<App>>,
    Extension(id): Extension<RequestId>,
    body: Body,
) -> Result<Response, ApiError> {
    let call = body.parse(&app, completions::parse).await?;
    call.run(&app, id).await
}

/// Answer in OpenAI's newer form
#[utoipa::path(post, path = "/v1/responses", tag = "Generate", request_body = ResponseRequest,
    responses(
        (status = 200, description = "The answer; with `stream`, its events",
            content((ResponseAnswer = "application/json"), (ResponseEvent = "text/event-stream"))),
        (status = "4XX", description = "Refused", body = Failure), (status = "5XX", description = "Failed", body = Failure)))]
async fn respond(
    State(app): State<Arc<App>>,
    Extension(id): Extension<RequestId>,
    body: Body,
) -> Result<Response, ApiError> {
    let asked = body.parse(&app, responses::parse).await?;
    asked.run(&app, id).await
}

/// Embed texts: the last layer's output for the last token, of length 1
#[utoipa::path(post, path = "/v1/embeddings", tag = "Embed", request_body = EmbeddingRequest,
    responses(
        (status = 200, description = "One embedding a text", body = Embeddings),
        (status = "4XX", description = "Refused", body = Failure), (status = "5XX", description = "Failed", body = Failure)))]
async fn embed(
    State(app): State<Arc<App>>,
    Extension(id): Extension<RequestId>,
    body: Body,
) -> Result<Response, ApiError> {
    let asked = body.parse(&app, embeddings::parse).await?;
    asked.run(&app, id).await
}

/// The tokens of a text or a chat
#[utoipa::path(post, path = "/tokenize", tag = "Tokens", request_body = TokenizeRequest,
    responses(
        (status = 200, description = "The tokens", body = Tokens), (status = "4XX", description = "Refused", body = Failure)))]
async fn tokenize(State(app): State<Arc<App>>, body: Body) -> Result<Json<Value>, ApiError> {
    body.parse(&app, tokens::tokenize).await.map(Json)
}

/// The text of tokens
#[utoipa::path(post, path = "/detokenize", tag = "Tokens", request_body = DetokenizeRequest,
    responses(
        (status = 200, description = "The text", body = Prompt), (status = "4XX", description = "Refused", body = Failure)))]
async fn detokenize(State(app): State<Arc<App>>, body: Body) -> Result<Json<Value>, ApiError> {
    body.parse(&app, tokens::detokenize).await.map(Json)
}

/// Attention methods
///
/// Every method with its parameters, the schema of the `attention` object, the presets that may stand in its place by
/// their names, and the attention of a request that says nothing of it.
#[utoipa::path(get, path = "/v1/attention/methods", tag = "Look", responses(
        (status = 200, description = "All of them", body = Object), (status = "4XX", description = "No key", body = Failure)))]
async fn methods(State(app): State<Arc<App>>) -> Json<Value> {
    let mut document = app.config.live.attention().document(app.config.artifacts.dense_below());
    document["presets"] = json!(*app.config.live.presets());
    Json(document)
}

/// The models served
///
/// There is one, under each of its names; the first stands in answers.
#[utoipa::path(get, path = "/v1/models", tag = "Look", responses(
        (status = 200, description = "All names", body = Models), (status = "4XX", description = "No key", body = Failure)))]
async fn models(State(app): State<Arc<App>>) -> Json<Value> {
    Json(json!({"object": "list", "data": app.config.names.iter().map(|name| card(&app, name)).collect::<Vec<_>>()}))
}

/// A model
#[utoipa::path(get, path = "/v1/models/{*id}", tag = "Look", params(("id" = String, Path, description = "Its name")),
    responses(
        (status = 200, description = "It is served", body = Model), (status = "4XX", description = "It is not", body = Failure)))]
async fn model(State(app): State<Arc<App>>, Path(id): Path<String>) -> Result<Json<Value>, ApiError> {
    app.check_model(Some(&id))?;
    Ok(Json(card(&app, &id)))
}

fn card(app: &App, name: &str) -> Value {
    json!({
        "id": name,
        "object": "model",
        "created": app.engine.model().created,
        "owned_by": "taper",
        "max_model_len": app.engine.limits().context_tokens,
    })
}

/// Whether the engine lives
///
/// It stays 200 while the server drains.
#[utoipa::path(get, path = "/health", tag = "Operate", security(()),
    responses(
        (status = 200, description = "It does"),
        (status = 503, description = "It died, or hangs: a step takes longer than `step_seconds`", body = Failure)))]
async fn health(State(app): State<Arc<App>>) -> Result<StatusCode, ApiError> {
    let load = app.engine.load();
    if load.dead && !load.draining {
        return Err(error::refused(&SubmitError::Dead, "", "", None));
    }
    moves(&app, &load)?;
    Ok(StatusCode::OK)
}

/// Fails where the engine has been at a step for too long.
fn moves(app: &App, load: &Load) -> Result<(), ApiError> {
    let most = app.config.step_timeout;
    match load.turn.filter(|turn| *turn > most) {
        Some(turn) => {
            let (turn, most) = (turn.as_secs(), most.as_secs());
            let message = format!("a step has taken {turn} seconds, and step_seconds is {most}");
            Err(ApiError::new(StatusCode::SERVICE_UNAVAILABLE, message))
        }
        None => Ok(()),
    }
}

/// Whether a request would be taken
#[utoipa::path(get, path = "/ready", tag = "Operate", security(()),
    responses(
        (status = 200, description = "It would", body = Ready),
        (status = 503, description = "It would not, or a step takes longer than `step_seconds`", body = Failure)))]
async fn ready(State(app): State<Arc<App>>) -> Result<Json<Value>, ApiError> {
    let load = app.engine.load();
    if load.draining || load.dead {
        let error = if load.dead { SubmitError::Dead } else { SubmitError::Draining };
        return Err(error::refused(&error, "", "", None));
    }
    moves(&app, &load)?;
    let limits = app.engine.limits();
    Ok(Json(json!({
        "waiting": load.waiting,
        "running": load.running,
        "cache_tokens": limits.cache_tokens,
        "offloaded_tokens": limits.offloaded_tokens,
    })))
}

/// The program's version
#[utoipa::path(get, path = "/version", tag = "Operate", security(()), responses((status = 200, description = "It", body = Version)))]
async fn version() -> Json<Value> {
    Json(json!({"version": env!("CARGO_PKG_VERSION")}))
}

/// Metrics for Prometheus
///
/// Under vLLM's names where they mean the same, and Taper's own.
#[utoipa::path(get, path = "/metrics", tag = "Operate", security(()),
    responses((status = 200, description = "Prometheus's text", body = String, content_type = "text/plain")))]
async fn metrics(State(app): State<Arc<App>>) -> impl IntoResponse {
    ([(header::CONTENT_TYPE, "text/plain; version=0.0.4; charset=utf-8")], app.metrics.text(&app.engine))
}
