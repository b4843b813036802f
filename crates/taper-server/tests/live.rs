//! Over a real socket: clients that vanish, and draining.

mod support;

use serde_json::json;
use std::net::SocketAddr;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex};
use std::time::Duration;
use support::{Server, server, wait};
use taper_server::{ServerConfig, serve};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::oneshot;
use tokio::task::JoinHandle;
use tracing::field::{Field, Visit};
use tracing::{Event, Metadata, Subscriber, span};

async fn listen(server: &Server) -> (SocketAddr, oneshot::Sender<()>, JoinHandle<std::io::Result<()>>) {
    with(server, ServerConfig::default()).await
}

async fn with(
    server: &Server,
    config: ServerConfig,
) -> (SocketAddr, oneshot::Sender<()>, JoinHandle<std::io::Result<()>>) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let (stop, stopped) = oneshot::channel();
    let engine = std::sync::Arc::clone(&server.engine);
    let stopped = async {
        let _ = stopped.await;
    };
    let task = tokio::spawn(serve(listener, None, engine, config, stopped));
    (address, stop, task)
}

async fn post(address: SocketAddr, prompt: &str, stream: bool) -> TcpStream {
    let body = json!({"prompt": prompt, "stream": stream, "temperature": 0, "max_tokens": 200, "ignore_eos": true});
    send(address, "Host: x\r\n", &body.to_string()).await
}

async fn send(address: SocketAddr, headers: &str, body: &str) -> TcpStream {
    let mut socket = TcpStream::connect(address).await.unwrap();
    let head = format!(
        "POST /v1/completions HTTP/1.1\r\n{headers}Connection: close\r\nContent-Length: {}\r\n\r\n",
        body.len()
    );
    socket.write_all((head + body).as_bytes()).await.unwrap();
    socket
}

#[tokio::test]
async fn a_client_that_vanishes_is_cancelled_streaming_or_not() {
    let server = server("abc");
    let (address, _stop, _task) = listen(&server).await;
    for stream in [true, false] {
        let before = server.probe.steps.load(Ordering::SeqCst);
        let mut socket = post(address, "SLOW", stream).await;
        if stream {
            let mut some = [0; 64];
            assert!(socket.read(&mut some).await.unwrap() > 0);
        }
        wait("three steps", || server.probe.steps.load(Ordering::SeqCst) >= before + 3).await;
        drop(socket);
        wait("cancelled", || server.engine.load().running == 0).await;
        let steps = server.probe.steps.load(Ordering::SeqCst) - before;
        assert!(steps < 20, "of 200 steps {steps} were made");
        assert_eq!(server.probe.open.load(Ordering::SeqCst), 0);
    }
}

#[tokio::test]
async fn on_loopback_no_name_but_localhost_makes_a_page_the_servers_own() {
    let server = server("abc");
    let (address, _stop, _task) = listen(&server).await;
    let port = address.port();
    for (host, status) in [("127.0.0.1", 200), ("localhost", 200), ("rebound.example", 403)] {
        let body = json!({"prompt": "hi", "max_tokens": 1}).to_string();
        let headers = format!("Host: {host}:{port}\r\nOrigin: http://{host}:{port}\r\n");
        let mut socket = send(address, &headers, &body).await;
        let mut heard = String::new();
        socket.read_to_string(&mut heard).await.unwrap();
        assert!(heard.starts_with(&format!("HTTP/1.1 {status}")), "{host}: {heard}");
    }
}

#[tokio::test]
async fn draining_answers_what_was_taken_and_then_closes() {
    let server = server("abcdefghij");
    let (address, stop, task) = listen(&server).await;
    let mut running = post(address, "SLOW", true).await;
    wait("it runs", || server.engine.load().running == 1).await;
    stop.send(()).unwrap();
    wait("it drains", || server.engine.load().draining).await;
    let mut refused = String::new();
    post(address, "late", false).await.read_to_string(&mut refused).await.unwrap();
    assert!(refused.starts_with("HTTP/1.1 503"), "{refused}");
    assert!(refused.contains("retry-after: 1"), "{refused}");
    let mut answer = String::new();
    running.read_to_string(&mut answer).await.unwrap();
    assert!(answer.contains("\"finish_reason\":\"length\"") && answer.contains("[DONE]"), "{answer}");
    tokio::time::timeout(Duration::from_secs(5), task).await.unwrap().unwrap().unwrap();
    assert!(TcpStream::connect(address).await.is_err(), "the socket is closed");
}

#[tokio::test]
async fn clients_that_send_nothing_more_are_let_go() {
    let server = server("ok");
    let soon = Duration::from_secs(1);
    let config = ServerConfig { header_timeout: soon, body_timeout: soon, ..ServerConfig::default() };
    let (address, _stop, _task) = with(&server, config).await;
    // Nothing at all, half a head, and nothing after an answer.
    let answered = "GET /health HTTP/1.1\r\nHost: x\r\n\r\n";
    for sent in ["", "POST /v1/completions HTTP/1.1\r\nHo", answered] {
        let mut socket = TcpStream::connect(address).await.unwrap();
        socket.write_all(sent.as_bytes()).await.unwrap();
        let mut heard = String::new();
        let read = tokio::time::timeout(Duration::from_secs(5), socket.read_to_string(&mut heard));
        // Whether by an end or by a reset, it is over.
        let _ = read.await.unwrap_or_else(|_| panic!("{sent:?} holds its connection"));
        assert_eq!(heard.starts_with("HTTP/1.1 200"), sent == answered, "{sent:?}: {heard}");
    }
    // Half a body.
    let mut socket = TcpStream::connect(address).await.unwrap();
    let head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 99\r\n\r\n{\"prompt\":";
    socket.write_all(head.as_bytes()).await.unwrap();
    let mut heard = String::new();
    let read = tokio::time::timeout(Duration::from_secs(5), socket.read_to_string(&mut heard));
    let _ = read.await.expect("half a body holds its connection");
    assert!(heard.starts_with("HTTP/1.1 408") && heard.contains("did not come within 1 seconds"), "{heard}");
}

/// The lines of the log that say how requests ended: their fields as text.
#[derive(Clone, Default)]
struct Lines(Arc<Mutex<Vec<Line>>>);

type Line = std::collections::BTreeMap<&'static str, String>;

/// Collects a line's fields.
struct Fields<'a>(&'a mut Line);

impl Lines {
    /// Of the request of that id.
    fn of(&self, id: &str) -> Option<Line> {
        let mut lines = self.0.lock().unwrap().clone();
        lines.retain(|line| line["id"] == format!("{id:?}"));
        assert!(lines.len() <= 1, "{lines:?}");
        lines.pop()
    }
}

impl Visit for Fields<'_> {
    fn record_debug(&mut self, field: &Field, value: &dyn std::fmt::Debug) {
        self.0.insert(field.name(), format!("{value:?}"));
    }
}

impl Subscriber for Lines {
    fn enabled(&self, about: &Metadata<'_>) -> bool {
        about.target() == "taper_server::access"
    }

    fn event(&self, event: &Event<'_>) {
        let mut line = Line::new();
        event.record(&mut Fields(&mut line));
        self.0.lock().unwrap().push(line);
    }

    fn new_span(&self, _: &span::Attributes<'_>) -> span::Id {
        span::Id::from_u64(1)
    }

    fn record(&self, _: &span::Id, _: &span::Record<'_>) {}

    fn record_follows_from(&self, _: &span::Id, _: &span::Id) {}

    fn enter(&self, _: &span::Id) {}

    fn exit(&self, _: &span::Id) {}
}

#[tokio::test]
async fn a_line_says_how_an_answer_ended_and_when() {
    let lines = Lines::default();
    tracing::subscriber::set_global_default(lines.clone()).unwrap();
    let server = server("abc");
    let (address, _stop, _task) = listen(&server).await;
    let cases = [
        (false, 60, 9.0, false, "200"),
        (true, 60, 9.0, false, "200"),
        (true, 200, 1.5, false, "504"),
        (false, 200, 1.5, false, "504"),
        (true, 200, 9.0, true, "499"),
        (false, 200, 9.0, true, "499"),
    ];
    for (case, (stream, most, timeout, leaves, status)) in cases.into_iter().enumerate() {
        let id = format!("case-{case}");
        let body =
            json!({"prompt": "SLOW", "max_tokens": most, "ignore_eos": true, "stream": stream, "timeout": timeout});
        let before = server.probe.steps.load(Ordering::SeqCst);
        let mut socket = send(address, &format!("Host: x\r\nX-Request-Id: {id}\r\n"), &body.to_string()).await;
        // They take 20 ms each.
        wait("some steps", || server.probe.steps.load(Ordering::SeqCst) >= before + 5).await;
        assert_eq!(lines.of(&id), None, "an answer that goes on has no line");
        if leaves {
            drop(socket);
        } else {
            socket.read_to_string(&mut String::new()).await.unwrap();
        }
        wait("a line", || lines.of(&id).is_some()).await;
        let line = lines.of(&id).unwrap();
        let seconds: f64 = line["seconds"].parse().unwrap();
        assert_eq!((line["status"].as_str(), line["path"].as_str()), (status, "\"/v1/completions\""), "{line:?}");
        assert!((0.08..5.0).contains(&seconds), "{stream} {line:?}");
    }
}
