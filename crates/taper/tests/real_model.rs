//! The program itself with the default model, which is fetched on first use: over HTTP and from the terminal.

mod tiny;

use opentelemetry_proto::tonic::collector::trace::v1::ExportTraceServiceRequest;
use prost::Message;
use serde_json::{Value, json};
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::process::{Child, Command, Output, Stdio};
use std::sync::mpsc;
use std::time::{Duration, Instant};

const PROGRAM: &str = env!("CARGO_BIN_EXE_taper");

/// A server on a free port; killed when dropped.
struct Server {
    child: Child,
    address: String,
    /// What it prints.
    out: BufReader<std::process::ChildStdout>,
}

impl Server {
    fn start() -> Self {
        Self::with(&[], &[])
    }

    fn with(args: &[&str], variables: &[(&str, &str)]) -> Self {
        Self::of(Self::command(args, variables).spawn().expect("the program starts"))
    }

    /// One that has just started.
    fn of(mut child: Child) -> Self {
        let mut out = BufReader::new(child.stdout.take().expect("piped"));
        let mut line = String::new();
        out.read_line(&mut line).expect("a greeting");
        let address =
            line.trim().rsplit_once("http://").unwrap_or_else(|| panic!("no address in {line:?}")).1.to_string();
        Self { child, address, out }
    }

    fn command(args: &[&str], variables: &[(&str, &str)]) -> Command {
        let mut command = Command::new(PROGRAM);
        command.args(["serve", "--port", "0", "--kv-memory", "256MiB"]).args(args);
        command.envs(variables.iter().copied()).stdout(Stdio::piped());
        command
    }

    /// One whose log is JSON: all that it says comes by the receiver, line by line.
    fn logging(args: &[&str], variables: &[(&str, &str)]) -> (Self, mpsc::Receiver<Value>) {
        let mut command = Self::command(args, variables);
        let mut child = command.args(["--log", "json"]).stderr(Stdio::piped()).spawn().expect("the program starts");
        let (lines, said) = mpsc::channel();
        let log = BufReader::new(child.stderr.take().expect("piped"));
        std::thread::spawn(move || {
            for line in log.lines().map(|line| line.expect("text")) {
                drop(lines.send(serde_json::from_str(&line).unwrap_or_else(|_| json!({"plain": line}))));
            }
        });
        let out = BufReader::new(child.stdout.take().expect("piped"));
        let address = heard(&said, "serving")["url"].as_str().expect("an address").replace("http://", "");
        (Self { child, address, out }, said)
    }

    fn request(&self, method: &str, path: &str, body: &str) -> (u16, String) {
        let mut socket = TcpStream::connect(&self.address).expect("it listens");
        let length = body.len();
        write!(
            socket,
            "{method} {path} HTTP/1.1\r\nHost: taper\r\nConnection: close\r\nContent-Length: {length}\r\n\r\n{body}"
        )
        .expect("sent");
        let mut answer = String::new();
        socket.read_to_string(&mut answer).expect("answered");
        let status = answer[9..12].parse().expect("a status");
        (status, answer.split_once("\r\n\r\n").expect("a body").1.to_string())
    }

    fn told_to_end(&self) {
        let killed = Command::new("kill").arg(self.child.id().to_string()).status().expect("kill runs");
        assert!(killed.success());
    }

    /// With success, in a while.
    fn ends(&mut self) {
        let start = Instant::now();
        let status = loop {
            if let Some(status) = self.child.try_wait().expect("it can be asked") {
                break status;
            }
            assert!(start.elapsed() < Duration::from_secs(20), "the server does not end");
            std::thread::sleep(Duration::from_millis(20));
        };
        assert!(status.success(), "{status}");
    }

    fn chat(&self, extra: Value) -> (u16, Value) {
        let mut body = json!({
            "messages": [{"role": "user", "content": "Name the capital city of France in one word."}],
            "temperature": 0, "max_tokens": 24, "seed": 1,
        });
        body.as_object_mut().expect("an object").extend(extra.as_object().expect("an object").clone());
        let (status, body) = self.request("POST", "/v1/chat/completions", &body.to_string());
        (status, serde_json::from_str(&body).unwrap_or_else(|e| panic!("{e}: {body}")))
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // Already gone after the drain test; nothing to do then.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn text(answer: &Value) -> &str {
    answer["choices"][0]["message"]["content"].as_str().expect("text")
}

#[test]
fn a_real_model_answers_with_the_attention_that_the_request_chose() {
    let mut server = Server::start();
    let (_, methods) = server.request("GET", "/v1/attention/methods", "");
    let printed = Command::new(PROGRAM).args(["methods", "--json"]).output().expect("the program starts").stdout;
    let [methods, printed]: [Value; 2] =
        [methods.as_bytes(), &printed].map(|t| serde_json::from_slice(t).expect("JSON"));
    assert_eq!(printed, methods);

    let (status, models) = server.request("GET", "/v1/models", "");
    assert_eq!(status, 200);
    let models: Value = serde_json::from_str(&models).expect("JSON");
    assert_eq!(models["data"][0]["id"], "SmolLM2-135M-Instruct");

    let (status, dense) = server.chat(json!({}));
    assert_eq!(status, 200, "{dense}");
    assert!(text(&dense).contains("Paris"), "{dense}");
    assert_eq!(dense["usage"]["attention"]["prefill"]["density"], 1.0);

    // Sinks and window hold all of a short prompt: everything is read, and no head had to give its sample up for that.
    let (_, promised) = server.chat(json!({"epsilon": 0.1, "delta": 0.1, "attention": {"audit": true}}));
    let decode = &promised["usage"]["attention"]["decode"];
    assert_eq!(decode["method"], "vattention", "{promised}");
    assert_eq!((&decode["dense_heads"], &decode["density"]), (&json!(0), &json!(1.0)), "{decode}");
    assert_eq!(decode["promise"], json!({"epsilon": 0.1, "delta": 0.1, "heads": 0}), "{decode}");
    assert!(decode["audit"]["error_max"].as_f64().expect("an error") < 1e-3, "{decode}");
    assert_eq!(text(&promised), text(&dense));

    let narrow = json!({"method": "streaming_llm", "sink": 2, "window": 8});
    let (_, sparse) = server.chat(json!({"attention": {"prefill": narrow, "decode": narrow}}));
    let usage = &sparse["usage"]["attention"];
    assert!(usage["decode"]["density"].as_f64().expect("a share") < 0.5, "{usage}");
    assert_eq!(usage["decode"]["budget_max"], 10);
    assert_ne!(text(&sparse), text(&dense), "ten keys are too few for the same answer");

    let (_, delta) = server.chat(json!({"gamma": 1}));
    assert_eq!(delta["usage"]["attention"]["prefill"]["method"], "delta");
    assert_eq!(text(&delta), text(&dense), "gamma 1 is dense attention");

    let (status, error) = server.chat(json!({"attention": {"decode": {"method": "vattention", "epsilon": 7}}}));
    assert_eq!((status, &error["error"]["param"]), (400, &json!("attention.decode.epsilon")), "{error}");

    let (_, drawn) = server.chat(json!({"temperature": 1.5, "n": 3}));
    let (_, again) = server.chat(json!({"temperature": 1.5, "n": 3}));
    assert_eq!(drawn["choices"], again["choices"], "a seed repeats all choices");
    assert_ne!(drawn["choices"][0]["message"], drawn["choices"][1]["message"]);

    let allowed = || -> f64 {
        let (_, metrics) = server.request("GET", "/metrics", "");
        let line = metrics.lines().find(|line| line.starts_with("taper:audit_over_allowed_total{"));
        line.and_then(|line| line.rsplit(' ').next()).map_or(0.0, |n| n.parse().expect("a number"))
    };
    let before = allowed();
    // A context long enough to sample from: far from all is read, and audited heads keep their promise.
    let (_, long) = server.chat(json!({
        "messages": [{"role": "user", "content": "The sea was calm and the wind came from the west. ".repeat(130)}],
        "attention": {"decode": {"method": "vattention", "epsilon": 0.1, "delta": 0.1}, "audit": true},
        "max_tokens": 16, "ignore_eos": true,
    }));
    let (tokens, decode) = (&long["usage"]["prompt_tokens"], &long["usage"]["attention"]["decode"]);
    assert!(tokens.as_u64().expect("a count") > 1300, "{tokens}");
    assert!(decode["density"].as_f64().expect("a share") < 0.7, "{decode}");
    // About 4,000 heads; a promise of 0.1 kept exactly would have more than 0.135 over it in no seed.
    assert!(decode["audit"]["heads"].as_u64().expect("a count") > 500, "{decode}");
    assert!(decode["audit"]["over_epsilon"].as_f64().expect("a share") < 0.135, "{decode}");
    assert_eq!(decode["audit"]["delta"], 0.1);
    let more = 0.1 * decode["audit"]["heads"].as_f64().expect("a count");
    assert!((allowed() - before - more).abs() < 1e-6, "{} after {before}: {decode}", allowed());

    drains(&mut server);
}

/// SIGHUP has keys and the default attention read again; what cannot be read changes nothing. All of it is said in JSON
/// where that is wanted.
#[cfg(unix)]
#[test]
fn settings_are_read_again_when_asked() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = |name: &str| folder.path().join(name).to_str().expect("UTF-8").to_string();
    let (keys, settings) = (path("keys.toml"), path("settings.toml"));
    let key = |key: &str| format!("[[keys]]\nname = 'a'\nkey = '{key}'\n");
    std::fs::write(&keys, key("first")).expect("written");
    std::fs::write(&settings, format!("api_keys = '{keys}'\n")).expect("written");
    let (mut server, said) = Server::logging(&["--config", &settings], &[("TAPER_SOMETHING_ELSE", "x")]);
    let ask = |key: &str| {
        let body = r#"{"prompt": "Once", "max_tokens": 1}"#;
        let head = format!("{}\r\nAuthorization: Bearer {key}", "HTTP/1.1");
        let mut socket = TcpStream::connect(&server.address).expect("it listens");
        let rest = format!("Host: taper\r\nConnection: close\r\nContent-Length: {}\r\n\r\n{body}", body.len());
        write!(socket, "POST /v1/completions {head}\r\n{rest}").expect("sent");
        let mut answer = String::new();
        socket.read_to_string(&mut answer).expect("answered");
        let json = answer.split_once("\r\n\r\n").expect("a body").1;
        let json: Value = serde_json::from_str(json).expect("JSON");
        (answer[9..12].to_string(), json["usage"]["attention"]["decode"]["method"].clone())
    };
    let hang_up = || {
        let pid = server.child.id().to_string();
        assert!(Command::new("kill").args(["-HUP", &pid]).status().expect("kill").success());
    };
    assert_eq!(ask("first"), ("200".into(), json!("dense")));
    let line = heard(&said, "answered");
    assert_eq!((&line["key"], &line["path"], &line["status"]), (&json!("a"), &json!("/v1/completions"), &json!(200)));
    assert!(line["id"].as_str().is_some_and(|id| id.len() == 32) && line["seconds"].as_f64() > Some(0.0), "{line}");
    std::fs::write(&keys, key("second")).expect("written");
    std::fs::write(&settings, format!("api_keys = '{keys}'\nattention = 'vattention'\n")).expect("written");
    assert_eq!(ask("first").0, "200", "not before it is asked");
    hang_up();
    heard(&said, "keys, certificate, presets and attention (dense / vattention) read again");
    assert_eq!((ask("first").0, ask("second")), ("401".into(), ("200".into(), json!("vattention"))));
    std::fs::write(&settings, "api_kees = 'x'\n").expect("written");
    hang_up();
    let kept = heard(&said, "settings stay as they were");
    assert!(kept["level"] == "WARN" && kept["message"].as_str().expect("text").contains("`api_kees`"), "{kept}");
    assert_eq!(ask("second").0, "200");
    server.told_to_end();
    heard(&said, "finishing what was taken");
    server.ends();
    let mut plain = String::new();
    server.out.read_to_string(&mut plain).expect("an end");
    plain.extend(said.iter().map(|line| line["plain"].to_string()).filter(|line| line != "null"));
    assert_eq!(plain, "", "nothing goes past the log");
}

/// SIGTERM while a stream runs: the stream ends properly and the program with success.
fn drains(server: &mut Server) {
    let body =
        json!({"prompt": "Once upon a time", "stream": true, "max_tokens": 120, "ignore_eos": true, "temperature": 0});
    let body = body.to_string();
    let mut socket = TcpStream::connect(&server.address).expect("it listens");
    let head = "POST /v1/completions HTTP/1.1\r\nHost: taper\r\nConnection: close\r\nContent-Length:";
    write!(socket, "{head} {}\r\n\r\n{body}", body.len()).expect("sent");
    let mut first = [0; 32];
    socket.read_exact(&mut first).expect("the stream begins");
    server.told_to_end();
    let mut rest = String::new();
    socket.read_to_string(&mut rest).expect("the stream goes on");
    assert!(rest.contains("\"finish_reason\":\"length\"") && rest.contains("data: [DONE]"), "{rest}");
    server.ends();
}

/// The next line of a log whose message begins so.
fn heard(said: &mpsc::Receiver<Value>, start: &str) -> Value {
    loop {
        let line = said.recv_timeout(Duration::from_secs(60)).unwrap_or_else(|error| panic!("no '{start}': {error}"));
        assert_eq!(line["plain"], Value::Null, "nothing goes past the log");
        if line["message"].as_str().is_some_and(|message| message.starts_with(start)) {
            return line;
        }
    }
}

/// Takes one batch of spans: the head that came with it, and it.
fn collect(listener: &TcpListener) -> (String, ExportTraceServiceRequest) {
    let (socket, _) = listener.accept().expect("somebody comes");
    let mut from = BufReader::new(socket);
    let (mut head, mut length) = (String::new(), 0);
    while !head.ends_with("\r\n\r\n") {
        let start = head.len();
        assert_ne!(from.read_line(&mut head).expect("a line"), 0, "{head}");
        if let Some(number) = head[start..].strip_prefix("content-length: ") {
            length = number.trim().parse().expect("a number");
        }
    }
    let mut body = vec![0; length];
    from.read_exact(&mut body).expect("a body");
    from.get_mut().write_all(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n").expect("sent");
    (head, ExportTraceServiceRequest::decode(&body[..]).expect("spans"))
}

/// All by OpenTelemetry's own variables, and the last batch at the end.
#[test]
fn spans_reach_a_collector_before_the_program_ends() {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let url = format!("http://{}", listener.local_addr().expect("an address"));
    let collected = std::thread::spawn(move || collect(&listener));
    let variables = [
        ("OTEL_EXPORTER_OTLP_ENDPOINT", url.as_str()),
        ("OTEL_EXPORTER_OTLP_HEADERS", "x-key=a%20secret"),
        ("OTEL_RESOURCE_ATTRIBUTES", "service.name=not this,host.name=here"),
        ("OTEL_SERVICE_NAME", "mine"),
        // None before the end.
        ("OTEL_BSP_SCHEDULE_DELAY", "600000"),
    ];
    let mut server = Server::with(&[], &variables);
    let (status, answer) = server.chat(json!({"epsilon": 0.1, "delta": 0.1, "attention": {"audit": true}}));
    assert_eq!(status, 200, "{answer}");
    server.told_to_end();
    server.ends();
    let (head, batch) = collected.join().expect("a batch");
    assert!(head.starts_with("POST /v1/traces HTTP/1.1\r\n") && head.contains("\r\nx-key: a secret\r\n"), "{head}");
    let resource = format!("{:?}", batch.resource_spans[0].resource);
    assert!(resource.contains("\"mine\"") && resource.contains("\"here\""), "{resource}");
    assert!(!resource.contains("not this"), "{resource}");
    let spans = &batch.resource_spans[0].scope_spans[0].spans;
    let names: Vec<&str> = spans.iter().map(|span| span.name.as_str()).collect();
    assert_eq!(names, ["queue", "prefill", "decode", "llm_request", "POST /v1/chat/completions"]);
    let attribute = |key: &str| {
        let found = spans[3].attributes.iter().find(|one| one.key == key).unwrap_or_else(|| panic!("no {key}"));
        format!("{:?}", found.value)
    };
    let audit = &answer["usage"]["attention"]["decode"]["audit"];
    for (key, said) in [
        ("taper.attention.decode.method", "vattention".to_string()),
        ("taper.attention.decode.audit.error_mean", audit["error_mean"].to_string()),
        ("gen_ai.usage.completion_tokens", answer["usage"]["completion_tokens"].to_string()),
        ("gen_ai.request.model", "SmolLM2-135M-Instruct".to_string()),
    ] {
        assert!(attribute(key).contains(&said), "{key} {said}: {}", attribute(key));
    }
}

/// A log that nobody reads any more costs lines, not requests.
#[test]
fn a_server_whose_log_is_gone_serves_and_ends() {
    let mut child = Server::command(&[], &[]).stderr(Stdio::piped()).spawn().expect("the program starts");
    drop(child.stderr.take());
    let mut server = Server::of(child);
    for _ in 0..2 {
        let (status, answer) = server.request("POST", "/v1/completions", r#"{"prompt": "Once", "max_tokens": 2}"#);
        assert_eq!(status, 200, "{answer}");
    }
    server.told_to_end();
    server.ends();
}

/// Nor does a greeting.
#[test]
fn a_server_whose_greeting_nobody_takes_runs_until_it_is_told_to_end() {
    let model = tiny::model();
    let args = ["--model", model.path().to_str().expect("UTF-8")];
    let mut child = Server::command(&args, &[]).stderr(Stdio::piped()).spawn().expect("the program starts");
    drop(child.stdout.take());
    let log = BufReader::new(child.stderr.take().expect("piped"));
    let mut said = log.lines().map(|line| line.expect("text"));
    assert!(said.any(|line| line == "settings:"), "it ended");
    assert!(Command::new("kill").arg(child.id().to_string()).status().expect("kill runs").success());
    assert!(child.wait().expect("it ends").success());
}

/// As in a container, where nothing ends process 1 that it does not listen to.
#[test]
fn a_server_that_still_loads_ends_when_it_is_told_to() {
    let mut child = Command::new(env!("CARGO_BIN_EXE_taper"))
        .args(["serve", "--port", "0"])
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .expect("the program starts");
    // Once it listens to signals it loads; a child that does not yet is ended by the signal itself.
    let status = format!("/proc/{}/status", child.id());
    let caught = || -> Option<u64> {
        let status = std::fs::read_to_string(&status).ok()?;
        let line = status.lines().find_map(|line| line.strip_prefix("SigCgt:"))?;
        u64::from_str_radix(line.trim(), 16).ok()
    };
    while caught().is_some_and(|signals| signals & (1 << 14) == 0) {
        std::thread::sleep(Duration::from_millis(1));
    }
    let started = Instant::now();
    assert!(Command::new("kill").arg(child.id().to_string()).status().expect("kill runs").success());
    let ended = child.wait().expect("it ends");
    assert!(started.elapsed() < Duration::from_secs(10));
    let mut said = String::new();
    child.stderr.take().expect("piped").read_to_string(&mut said).expect("text");
    assert!(said.contains("stopped before the model was loaded") && ended.code() == Some(2), "{ended}: {said}");
}

fn taper(args: &[&str], input: &str) -> Output {
    let mut child = Command::new(PROGRAM)
        .args(args)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("the program starts");
    child.stdin.take().expect("piped").write_all(input.as_bytes()).expect("read");
    child.wait_with_output().expect("it ends")
}

#[test]
fn generate_and_chat_answer_in_the_terminal() {
    let prompt = "The capital of France is";
    let once = taper(&["generate", "--prompt", prompt, "--max-tokens", "8"], "");
    assert!(once.status.success(), "{}", String::from_utf8_lossy(&once.stderr));
    assert!(String::from_utf8_lossy(&once.stdout).contains("Paris"));
    let stream = taper(
        &["generate", "--prompt", prompt, "--max-tokens", "8", "--stream", "--attention", "vattention", "--usage"],
        "",
    );
    assert_eq!(stream.stdout, once.stdout, "a short prompt reads all keys either way");
    assert!(String::from_utf8_lossy(&stream.stderr).contains("\"method\":\"vattention\""));

    // A chat's question is its last message, as the server has it; text without messages has none.
    let (long, window) = ("blue or green ".repeat(60), r#"{"method":"streaming_llm","sink":4,"window":64}"#);
    let dense = format!(r#"{{"prefill":{window},"question":"dense"}}"#);
    let ask = |more: &[&str]| {
        let args = ["generate", "--prompt", &long, "--max-tokens", "1", "--usage", "--attention", &dense];
        String::from_utf8(taper(&[&args[..], more].concat(), "").stderr).unwrap()
    };
    assert!(ask(&["--chat"]).contains(r#""density":1.0"#), "{}", ask(&["--chat"]));
    assert!(ask(&[]).contains("attention.question_tokens is missing"), "{}", ask(&[]));

    let floats = taper(&["generate", "--prompt", prompt, "--max-tokens", "8", "--dequantize", "--dtype", "f32"], "");
    assert!(String::from_utf8_lossy(&floats.stdout).contains("Paris"), "{}", String::from_utf8_lossy(&floats.stderr));
    let small = taper(&["generate", "--prompt", prompt, "--max-tokens", "1000", "--kv-memory", "3MiB"], "");
    assert!(small.status.success(), "as many as fit: {}", String::from_utf8_lossy(&small.stderr));

    let talk = taper(
        &["chat", "--max-tokens", "24"],
        "/attention nonsense\nMy name is Ada. Say hello.\n/reset\nName the capital city of France in one word.\n/quit\n",
    );
    let (out, err) = (String::from_utf8_lossy(&talk.stdout), String::from_utf8_lossy(&talk.stderr));
    assert!(talk.status.success(), "{err}");
    assert!(out.contains("Paris"), "{out}");
    assert!(err.contains("no attention preset or method is called \"nonsense\""), "{err}");
}

/// As in a terminal, where the signal goes to the program and not to its input.
#[cfg(unix)]
#[test]
fn ctrl_c_ends_an_answer_and_then_the_chat() {
    let mut child = Command::new(PROGRAM)
        .args(["chat", "--max-tokens", "1000", "--kv-memory", "256MiB", "--usage"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("the program starts");
    let interrupt = |child: &Child| {
        let killed = Command::new("kill").args(["-INT", &child.id().to_string()]).status().expect("kill runs");
        assert!(killed.success());
    };
    let (mut input, mut out) = (child.stdin.take().expect("piped"), child.stdout.take().expect("piped"));
    writeln!(input, "Write a very long story about a fox.").expect("read");
    let mut begun = [0; 300];
    out.read_exact(&mut begun).expect("a story");
    interrupt(&child);
    writeln!(input, "Name the capital city of France in one word.\n/attention quest").expect("read");
    let mut said = BufReader::new(child.stderr.take().expect("piped")).lines();
    let mut line = || said.next().expect("it is still there").expect("text");
    // Of the story there was no usage: it was not told to its end.
    let usage = loop {
        let said = line();
        if said.starts_with("prompt ") {
            break said;
        }
    };
    let prompt = usage.split(' ').nth(1).and_then(|tokens| tokens.parse::<usize>().ok()).expect("its tokens");
    // By itself the second question is of 42 tokens with what the template puts before it; the first one has some 20 and its
    // answer at least 60.
    assert!((110..1100).contains(&prompt), "{usage}");
    while line() != "prompts go by dense, answers by quest" {}
    interrupt(&child);
    assert_eq!(child.wait().expect("it ends").code(), Some(130));
}

/// At temperature 0 a prompt decides its seed, at any other a request without one gets a random one: those two are alike in one
/// run of four billion.
#[test]
fn requests_that_do_not_say_how_are_sampled_as_the_models_file_has_it() {
    let model = tiny::model();
    std::fs::write(model.path().join("generation_config.json"), r#"{"temperature": 0, "top_k": 1}"#).expect("written");
    let seeds = |args: &[&str]| {
        let folder = ["--model", model.path().to_str().expect("UTF-8")];
        let server = Server::with(&[&folder, args].concat(), &[]);
        [(); 2].map(|()| {
            let (status, body) = server.request("POST", "/v1/completions", r#"{"prompt": "xx", "max_tokens": 2}"#);
            assert_eq!(status, 200, "{body}");
            let answer: Value = serde_json::from_str(&body).expect("JSON");
            answer["usage"]["attention"]["prefill"]["seed"].as_u64().unwrap_or_else(|| panic!("a seed: {answer}"))
        })
    };
    let [one, other] = seeds(&[]);
    assert_eq!(one, other);
    let [one, other] = seeds(&["--generation-config", "false"]);
    assert_ne!(one, other);
}
