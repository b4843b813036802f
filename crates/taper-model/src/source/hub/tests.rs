use super::*;
use std::collections::HashMap;
use std::io::{BufRead, BufReader, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Instant;

const COMMIT: &str = "0123456789abcdef0123456789abcdef01234567";

/// Where a file's answer stops coming.
const STALLS: &str = "(stalls here)";

/// A file of a hub that does not answer the first question.
const SILENT_ONCE: &str = "(silent once)";

/// A hub on this machine that serves the files of one repository, `owner/tiny`, and counts what it is asked.
struct LocalHub {
    endpoint: String,
    requests: Arc<AtomicUsize>,
}

impl LocalHub {
    fn start(files: &[(&str, &str)]) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let endpoint = format!("http://{}", listener.local_addr().unwrap());
        let files: HashMap<String, String> = files.iter().map(|(k, v)| ((*k).to_owned(), (*v).to_owned())).collect();
        let files = Arc::new(Mutex::new(files));
        let requests = Arc::new(AtomicUsize::new(0));
        let counter = requests.clone();
        std::thread::spawn(move || {
            let mut unanswered = Vec::new();
            for stream in listener.incoming() {
                let asked = counter.fetch_add(1, Ordering::SeqCst);
                let (stream, files) = (stream.unwrap(), files.lock().unwrap());
                if asked == 0 && files.contains_key(SILENT_ONCE) {
                    unanswered.push(stream);
                } else {
                    answer(stream, &files);
                }
            }
        });
        Self { endpoint, requests }
    }

    fn wanted(&self, file: Option<&str>) -> HubModel {
        HubModel {
            repo: "owner/tiny".to_owned(),
            revision: "main".to_owned(),
            file: file.map(str::to_owned),
            endpoint: Some(self.endpoint.clone()),
            patience: Patience::LONG,
        }
    }
}

/// Answers one request and closes the connection.
fn answer(mut stream: TcpStream, files: &HashMap<String, String>) {
    let mut lines = BufReader::new(stream.try_clone().unwrap()).lines();
    let request = lines.next().unwrap().unwrap();
    let path = request.split(' ').nth(1).unwrap().to_owned();
    let mut range = None;
    for line in lines.map(|line| line.unwrap()).take_while(|line| !line.is_empty()) {
        if let Some(value) = line.to_ascii_lowercase().strip_prefix("range: bytes=") {
            let (start, end) = value.split_once('-').unwrap();
            range = Some((start.parse::<usize>().unwrap(), end.parse::<usize>().unwrap_or(usize::MAX)));
        }
    }
    let (status, headers, body) = if path.starts_with("/api/models/owner/tiny/") {
        let siblings: Vec<_> = files.keys().map(|file| serde_json::json!({"rfilename": file})).collect();
        let info = serde_json::json!({"siblings": siblings, "sha": COMMIT}).to_string();
        ("200 OK", "Content-Type: application/json\r\n".to_owned(), info)
    } else if let Some(body) = path.strip_prefix("/owner/tiny/resolve/main/").and_then(|file| files.get(file)) {
        let (start, end) = range.unwrap_or((0, usize::MAX));
        let part = body[start..(end.saturating_add(1)).min(body.len())].to_owned();
        let place = format!("Content-Range: bytes {start}-{}/{}\r\n", start + part.len() - 1, body.len());
        let etag = format!("x-repo-commit: {COMMIT}\r\netag: \"{}\"\r\n", path.replace('/', "-"));
        ("206 Partial Content", place + &etag, part)
    } else {
        ("404 Not Found", String::new(), String::new())
    };
    let length = body.len();
    let head = format!("HTTP/1.1 {status}\r\nContent-Length: {length}\r\nConnection: close\r\n{headers}\r\n");
    // The client may have gone away, which is its own affair.
    match body.split_once(STALLS) {
        Some((before, _)) => {
            let _ = stream.write_all((head + before).as_bytes());
            // Open for good, and silent.
            std::mem::forget(stream);
        }
        None => {
            let _ = stream.write_all((head + &body).as_bytes());
        }
    }
}

#[test]
fn a_hub_that_does_not_answer_is_waited_for_no_longer() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let cache = tempfile::tempdir().unwrap();
    let wanted = |times| HubModel {
        repo: "owner/tiny".to_owned(),
        revision: "main".to_owned(),
        file: None,
        endpoint: Some(format!("http://{}", listener.local_addr().unwrap())),
        patience: Patience { answer_max: Duration::from_secs(1), times },
    };
    for times in [1, 2] {
        let start = Instant::now();
        let error = resolve("owner/tiny", &wanted(times), cache.path(), Progress::Hidden).unwrap_err().to_string();
        let waited = Duration::from_secs(times);
        assert!((waited..waited + Duration::from_secs(10)).contains(&start.elapsed()), "{:?}", start.elapsed());
        assert!(error.contains(&format!("the hub did not answer within {times} s")), "{error}");
    }
}

#[test]
fn a_hub_that_is_silent_once_is_asked_again() {
    let hub = LocalHub::start(&[("a.gguf", "GGUF"), (SILENT_ONCE, "")]);
    let cache = tempfile::tempdir().unwrap();
    let patience = Patience { answer_max: Duration::from_secs(1), times: 2 };
    let wanted = HubModel { patience, ..hub.wanted(Some("a.gguf")) };
    resolve("owner/tiny", &wanted, cache.path(), Progress::Hidden).unwrap();
}

#[test]
fn a_file_that_stands_still_is_given_up() {
    let late = format!("GGUF{STALLS}and more");
    let never = format!("{STALLS}GGUF");
    let hub = LocalHub::start(&[("late.gguf", &late), ("never.gguf", &never)]);
    for file in ["late.gguf", "never.gguf"] {
        let cache = tempfile::tempdir().unwrap();
        let start = Instant::now();
        let error = resolve("owner/tiny", &hub.wanted(Some(file)), cache.path(), Progress::Hidden).unwrap_err();
        assert!(start.elapsed() < STILL_MAX + Duration::from_secs(10), "{:?}", start.elapsed());
        assert!(error.to_string().contains(&format!("{file}: nothing came for 3 s")), "{error}");
    }
}

/// The configuration of a model that can be read.
const CONFIG: &str = include_str!("../../../tests/golden/llama3/config.json");

#[test]
fn weights_are_not_fetched_of_a_model_that_cannot_be_read() {
    let other = CONFIG.replace("LlamaForCausalLM", "Qwen2ForCausalLM");
    let quantised = CONFIG.replacen('{', r#"{"quantization_config": {"quant_method": "gptq"},"#, 1);
    let tokenizer = ("tokenizer.json", "{}");
    for (config, tokenizer, says) in [
        (other.as_str(), tokenizer, "config.json: architectures: Qwen2ForCausalLM is not supported"),
        (&quantised, tokenizer, "config.json: quantization_config: a quantised safetensors checkpoint"),
        (CONFIG, ("tokenizer.model", ""), "the repository has no tokenizer.json, which transformers writes by AutoTok"),
    ] {
        let hub = LocalHub::start(&[("config.json", config), tokenizer, ("model.safetensors", "weights")]);
        let cache = tempfile::tempdir().unwrap();
        let error = resolve("owner/tiny", &hub.wanted(None), cache.path(), Progress::Hidden).unwrap_err().to_string();
        assert!(error.contains(says), "{error}");
        let repo = Cache::new(cache.path().join("hub")).model("owner/tiny".to_owned());
        assert!(repo.get("config.json").is_some() && repo.get("model.safetensors").is_none(), "{says}");
    }
}

#[test]
fn a_folder_is_fetched_once_and_then_found_without_asking() {
    let hub = LocalHub::start(&[
        ("config.json", CONFIG),
        ("tokenizer.json", "{\"a\": 1}"),
        ("model.safetensors", "weights"),
        ("model-00001-of-00001.safetensors", "the same weights"),
        ("README.md", "words"),
        ("original/params.json", "{}"),
    ]);
    let cache = tempfile::tempdir().unwrap();
    let find = || resolve("owner/tiny", &hub.wanted(None), cache.path(), Progress::Hidden).unwrap();
    let found = find();
    assert_eq!(found.name, "owner/tiny");
    let ModelFiles::Folder(folder) = &found.files else { panic!("{found:?}") };
    assert_eq!(std::fs::read_to_string(folder.join("tokenizer.json")).unwrap(), "{\"a\": 1}");
    assert_eq!(std::fs::read_to_string(folder.join("model.safetensors")).unwrap(), "weights");
    for unneeded in ["model-00001-of-00001.safetensors", "README.md", "original"] {
        assert!(!folder.join(unneeded).exists(), "{unneeded}");
    }
    let requests = hub.requests.load(Ordering::SeqCst);
    assert_eq!(find(), found);
    assert_eq!(hub.requests.load(Ordering::SeqCst), requests, "a second start asks nothing");
}

#[test]
fn of_weights_in_parts_those_are_fetched_that_the_index_names() {
    let index =
        r#"{"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "pytorch_model-00002-of-00002.safetensors"}}"#;
    let files = [
        ("config.json", CONFIG),
        ("tokenizer.json", "{}"),
        ("model.safetensors.index.json", index),
        ("model-00001-of-00002.safetensors", "one"),
        ("pytorch_model-00002-of-00002.safetensors", "two"),
        ("model.fp8.safetensors", "the same in few bits"),
    ];
    let hub = LocalHub::start(&files);
    let cache = tempfile::tempdir().unwrap();
    let found = resolve("owner/tiny", &hub.wanted(None), cache.path(), Progress::Hidden).unwrap();
    let ModelFiles::Folder(folder) = &found.files else { panic!("{found:?}") };
    let there = files.map(|(file, _)| folder.join(file).exists());
    assert_eq!(there, [true, true, true, true, true, false]);
    // What the index names and nobody has is told.
    let hub = LocalHub::start(&files[..4]);
    let cache = tempfile::tempdir().unwrap();
    let error = resolve("owner/tiny", &hub.wanted(None), cache.path(), Progress::Hidden).unwrap_err().to_string();
    assert!(error.contains("pytorch_model-00002-of-00002.safetensors"), "{error}");
}

#[test]
fn a_gguf_file_is_fetched_by_name_only() {
    let hub = LocalHub::start(&[("a.Q4_1.gguf", "GGUF"), ("a.Q8_0.gguf", "GGUF, longer")]);
    let cache = tempfile::tempdir().unwrap();
    let ask = |file| resolve("owner/tiny", &hub.wanted(file), cache.path(), Progress::Hidden);
    let error = ask(None).unwrap_err().to_string();
    assert!(error.contains("owner/tiny:FILE") && error.contains("a.Q8_0.gguf"), "{error}");
    let error = ask(Some("b.gguf")).unwrap_err().to_string();
    assert!(error.contains("b.gguf"), "{error}");
    let found = ask(Some("a.Q8_0.gguf")).unwrap();
    assert_eq!(found.name, "a.Q8_0");
    let ModelFiles::Gguf(path) = &found.files else { panic!("{found:?}") };
    assert_eq!(std::fs::read_to_string(path).unwrap(), "GGUF, longer");
}

#[test]
fn a_gguf_model_in_parts_is_fetched_whole() {
    let hub = LocalHub::start(&[("q/a-00001-of-00002.gguf", "one"), ("q/a-00002-of-00002.gguf", "two")]);
    let cache = tempfile::tempdir().unwrap();
    let wanted = hub.wanted(Some("q/a-00001-of-00002.gguf"));
    let found = resolve("owner/tiny", &wanted, cache.path(), Progress::Hidden).unwrap();
    let ModelFiles::Gguf(path) = &found.files else { panic!("{found:?}") };
    let read = |name: &str| std::fs::read_to_string(path.with_file_name(name)).unwrap();
    assert_eq!((read("a-00001-of-00002.gguf"), read("a-00002-of-00002.gguf")), ("one".to_owned(), "two".to_owned()));
}
