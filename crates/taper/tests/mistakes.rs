//! What cannot be done ends with exit code 2 and one clear line.

mod tiny;

use std::io::Write;
use std::process::{Command, Stdio};

fn fails(args: &[&str], says: &str) {
    let output = Command::new(env!("CARGO_BIN_EXE_taper")).args(args).output().expect("the program starts");
    let error = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(2), "{args:?}: {error}");
    assert!(error.contains(says), "{args:?} should say {says}: {error}");
    assert!(!error.contains("panicked"), "{error}");
    assert!(output.stdout.is_empty());
}

fn fails_in_one_line(args: &[&str], says: &str) {
    fails(args, says);
    let output = Command::new(env!("CARGO_BIN_EXE_taper")).args(args).output().expect("the program starts");
    let error = String::from_utf8_lossy(&output.stderr);
    assert_eq!(error.lines().count(), 1, "{error}");
    assert!(error.starts_with("taper: "), "{error}");
}

#[test]
fn models_that_cannot_be_loaded() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = |name: &str| folder.path().join(name).to_str().expect("UTF-8").to_string();
    std::fs::write(path("short.gguf"), b"GGUF\x03\x00").expect("written");
    std::fs::write(path("model.bin"), b"x").expect("written");
    fails_in_one_line(&["generate", "--prompt", "x", "--model", &path("short.gguf")], "short.gguf");
    fails_in_one_line(&["generate", "--prompt", "x", "--model", &path("model.bin")], "model.bin");
    fails_in_one_line(&["serve", "--port", "0", "--model", folder.path().to_str().expect("UTF-8")], "config.json");
    fails_in_one_line(&["chat", "--model", "no-such-model"], "no-such-model");
}

#[test]
fn arguments_that_mean_nothing() {
    fails_in_one_line(&["generate", "--prompt", "x", "--attention", "vatention"], "did you mean \"vattention\"?");
    fails_in_one_line(
        &["serve", "--attention", r#"{"decode": {"method": "dense", "epsilon": 1}}"#],
        "attention.decode.epsilon",
    );
    let model = tiny::model();
    let model = model.path().to_str().expect("UTF-8");
    for (flag, value, says) in [
        (
            "--kv-memory",
            "many",
            "--kv-memory: \"many\" has the unknown unit \"many\"; write for example 512MiB or 2GiB",
        ),
        ("--kv-memory", "-1GiB", "--kv-memory: \"-1GiB\" must be greater than 0"),
        ("--kv-dtype", "f8", "--kv-dtype: \"f8\" must be auto, f16, bf16 or f32"),
        ("--context", "0", "--context: 0 must be at least 1"),
        (
            "--context",
            "9999999",
            "--context: 9999999 must be at least 1, and at most the model's own context of 64 tokens",
        ),
    ] {
        let flag = format!("{flag}={value}");
        fails_in_one_line(&["serve", "--port", "0", "--model", model, &flag], says);
        fails_in_one_line(&["generate", "--prompt", "x", "--model", model, &flag], says);
    }
    fails_in_one_line(&["serve", "--config", "/does/not/exist.toml"], "/does/not/exist.toml");
    fails_in_one_line(&["serve", "--host", "256.1.1.1", "--port", "0"], "256.1.1.1");
    fails_in_one_line(&["serve", "--dtype", "int4"], "must be auto, f32");
    // Known before a model is looked for, as by `config check`.
    for what in [&["serve"][..], &["config", "check"]] {
        for (flag, value, says) in [
            ("--stretch", "nan", "stretch is NaN"),
            ("--presets", "/nowhere", "presets: /nowhere"),
            ("--artifacts", "/nowhere", "artifacts: /nowhere"),
            ("--model", "", "model: must be"),
            ("--context", "0", "--context: 0 must be at least 1"),
        ] {
            fails_in_one_line(&[what, &[flag, value]].concat(), says);
        }
        fails_in_one_line(
            &[what, &["--artifacts", "/tmp", "--attention", "vatention"]].concat(),
            "did you mean \"vattention\"?",
        );
    }
    fails(&["serve", "--port", "70000"], "70000");
    fails(&["generate", "--prompt", "x", "--temperature", "3"], "[0, 2]");
    fails(&["generate"], "--prompt");
    fails(&["generate", "--prompt", "x", "--prompt-file", "y"], "cannot be used with");
    fails_in_one_line(&["generate", "--prompt-file", "/does/not/exist"], "--prompt-file: /does/not/exist: ");
}

/// It stands in nobody's way who does not ask for it.
#[test]
fn a_models_sampling_that_no_request_may_have() {
    let model = tiny::model();
    std::fs::write(model.path().join("generation_config.json"), r#"{"temperature": 2.5}"#).expect("written");
    let model = model.path().to_str().expect("UTF-8");
    fails_in_one_line(&["serve", "--port", "0", "--model", model], "generation_config.json: temperature: 2.5 is not");
    fails_in_one_line(&["serve", "--port", "0", "--model", model], "--generation-config vllm");
    let args = ["generate", "--prompt", "x", "--max-tokens", "1", "--kv-memory", "64MiB", "--model", model];
    let output = Command::new(env!("CARGO_BIN_EXE_taper")).args(args).output().expect("the program starts");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}

#[test]
fn an_answer_shorter_than_was_wanted_is_said_to_be() {
    let model = tiny::model();
    let run = |max_tokens: &str| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_taper"));
        command.args(["generate", "--prompt", "xxx", "--kv-memory", "64MiB", "--max-tokens", max_tokens, "--model"]);
        let output = command.arg(model.path()).output().expect("the program starts");
        assert!(output.status.success(), "{output:?}");
        String::from_utf8(output.stderr).expect("UTF-8")
    };
    let says = "warning: --max-tokens: 62 is more than fits after the prompt's 3 tokens; at most 61 are generated\n";
    assert_eq!(run("62"), says);
    assert_eq!(run("61"), "");
}

#[test]
fn a_prompt_of_a_file_is_as_long_as_it_fits() {
    let model = tiny::model();
    let prompt = model.path().join("prompt.txt");
    std::fs::write(&prompt, "xxx\n").expect("written");
    let line = ["generate", "--kv-memory", "64MiB", "--max-tokens", "1", "--usage", "--model"];
    let line = [&line[..], &[model.path().to_str().expect("UTF-8"), "--prompt-file"]].concat();
    for (file, input) in [(prompt.to_str().expect("UTF-8"), ""), ("-", "xxx\n")] {
        let said = said(&[&line[..], &[file]].concat(), input);
        assert!(said.starts_with("prompt 3 tokens, answer 1 tokens\n"), "{said}");
    }
}

#[test]
fn a_bench_takes_what_fits_unless_it_is_told_how_much() {
    let model = tiny::model();
    let text = model.path().join("text.txt");
    std::fs::write(&text, "x".repeat(200)).expect("written");
    let [model, text] = [model.path(), &text].map(|path| path.to_str().expect("UTF-8"));
    let bench = ["bench", "methods", "--rounds", "1", "--tokens", "4", "--kv-memory", "64MiB"];
    let bench = [&bench[..], &["--model", model, "--text", text]].concat();
    let output = Command::new(env!("CARGO_BIN_EXE_taper")).args(&bench).output().expect("the program starts");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let says = "--length: 59 tokens and 6 more of each method do not fit; the model's context is 64";
    fails_in_one_line(&[&bench[..], &["--length", "59"]].concat(), says);
}

/// Before a model is looked for, since they are written hours later.
#[test]
fn files_that_could_not_be_written_are_told_at_once() {
    for command in ["eval needle", "eval heads", "bench methods", "bench model --shape x", "train kmeans --out nowhere"]
    {
        let line = [&command.split(' ').collect::<Vec<_>>()[..], &["--markdown", "/dev/null/x"]].concat();
        fails_in_one_line(&line, "--markdown: /dev/null/x: ");
    }
    let load = ["bench", "serve", "--url", "http://127.0.0.1:1"];
    for (command, flag) in [(&["eval", "needle"][..], "--json"), (&load, "--json"), (&load, "--plot")] {
        fails_in_one_line(&[command, &[flag, "/dev/null/x"]].concat(), &format!("{flag}: /dev/null/x: "));
    }
    fails(&["bench", "serve", "--timeout", "0"], "--timeout");
}

#[test]
fn what_a_command_would_not_look_at() {
    for (command, flags) in [
        ("eval needle", &["--attention", "--presets"][..]),
        ("bench methods", &["--attention", "--presets", "--chat-template"]),
        ("eval heads", &["--attention", "--presets", "--chat-template", "--kv-memory", "--kv-offload-dir"]),
        (
            "train saap --out nowhere",
            &["--attention", "--artifacts", "--chat-template", "--kv-dtype", "--kv-offload-dir"],
        ),
    ] {
        let words: Vec<&str> = command.split(' ').collect();
        let help = Command::new(env!("CARGO_BIN_EXE_taper")).args(&words[..2]).arg("--help").output();
        let help = String::from_utf8(help.expect("the program starts").stdout).expect("UTF-8");
        for flag in flags {
            fails_in_one_line(&[&words[..], &[flag, "x"]].concat(), &format!("{flag}: "));
            assert!(!help.contains(&format!("{flag} <")), "{command} shows {flag}");
        }
    }
}

/// In a terminal both come to one place.
#[test]
fn what_an_answer_took_stands_on_lines_of_its_own() {
    let model = tiny::model();
    let path = model.path().join("said.txt");
    for stream in [&[][..], &["--stream"]] {
        let said = std::fs::File::create(&path).expect("made");
        let mut command = Command::new(env!("CARGO_BIN_EXE_taper"));
        command.args(["generate", "--prompt", "xxx", "--kv-memory", "64MiB", "--max-tokens", "2", "--usage"]);
        command.args(stream).arg("--model").arg(model.path());
        command.stdout(said.try_clone().expect("a copy")).stderr(said);
        assert!(command.status().expect("the program starts").success());
        let said = std::fs::read_to_string(&path).expect("UTF-8");
        assert!(said.contains("\nprompt 3 tokens, answer 2 tokens\nattention {"), "{said}");
    }
}

/// What is said to standard error; `input` comes from standard input.
fn said(args: &[&str], input: &str) -> String {
    let mut command = Command::new(env!("CARGO_BIN_EXE_taper"));
    command.args(args).stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::piped());
    let mut child = command.spawn().expect("the program starts");
    child.stdin.take().expect("piped").write_all(input.as_bytes()).expect("taken");
    let output = child.wait_with_output().expect("it ends");
    assert!(output.status.success(), "{output:?}");
    String::from_utf8(output.stderr).expect("UTF-8")
}

#[test]
fn a_chat_says_what_attention_it_has_from_now_on() {
    let model = tiny::model();
    let chat = ["chat", "--kv-memory", "64MiB", "--model", model.path().to_str().expect("UTF-8")];
    let said = said(&chat, "/attention quest\n/attention delta\n/attention qest\n/quit\n");
    let lines: Vec<&str> = said.lines().collect();
    assert_eq!(lines[..2], ["prompts go by dense, answers by quest", "prompts go by delta, answers by dense"]);
    assert!(lines.len() == 3 && lines[2].contains("did you mean \"quest\"?"), "{said}");
}

#[test]
fn what_attention_did_has_no_density_of_nothing() {
    let model = tiny::model();
    let model = model.path().to_str().expect("UTF-8");
    let densities = |tokens: &str| {
        let line = format!("generate --prompt xxx --kv-memory 64MiB --usage --max-tokens {tokens} --model {model}");
        let said = said(&line.split(' ').collect::<Vec<_>>(), "");
        let told = said.lines().find_map(|line| line.strip_prefix("attention ")).unwrap_or_else(|| panic!("{said}"));
        let told: serde_json::Value = serde_json::from_str(told).expect("JSON");
        ["prefill", "decode"].map(|phase| told[phase].get("density").cloned())
    };
    // The prompt gives the first token.
    assert_eq!(densities("1"), [Some(1.0.into()), None]);
    assert_eq!(densities("2"), [Some(1.0.into()), Some(1.0.into())]);
}

#[test]
fn the_settings_that_would_be_are_shown_and_checked() {
    let check = |args: &[&str], variables: &[(&str, &str)]| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_taper"));
        command.args(["config", "check"]).args(args).envs(variables.iter().copied());
        let output = command.output().expect("the program starts");
        let [out, error] = [output.stdout, output.stderr].map(|text| String::from_utf8(text).expect("UTF-8"));
        (output.status.code(), out, error)
    };
    let example = concat!(env!("CARGO_MANIFEST_DIR"), "/../../configs/server/example.toml");
    let (code, text, error) =
        check(&["--config", example, "--port", "9000"], &[("TAPER_QUEUE", "7"), ("TAPER_PORT", "1")]);
    assert_eq!((code, error.as_str()), (Some(0), ""));
    for line in ["port = 9000", "queue = 7", "model = \"default\"", "prefix_cache = true"] {
        assert!(text.lines().any(|one| one == line), "{line}: {text}");
    }
    // What is shown says the same again.
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("shown.toml");
    std::fs::write(&path, &text).expect("written");
    assert_eq!(check(&["--config", path.to_str().expect("UTF-8")], &[]).1, text);
    // OpenTelemetry's variables count where nothing else says anything of a collector; what is in headers is not shown.
    let collector = |args: &[&str], variables: &[(&str, &str)]| {
        let all = ["ENDPOINT", "HEADERS"].map(|end| format!("OTEL_EXPORTER_OTLP_{end}"));
        let given = [(all[0].as_str(), "http://c:4318"), (all[1].as_str(), "key=hidden")];
        let (code, text, error) = check(args, &[&given[..], variables].concat());
        assert!(code == Some(0) && !text.contains("hidden"), "{text}{error}");
        text.lines().find_map(|line| line.strip_prefix("otlp_traces_endpoint = ")).map(str::to_owned)
    };
    assert_eq!(collector(&[], &[]).as_deref(), Some("\"http://c:4318/v1/traces\""));
    assert_eq!(collector(&["--otlp-traces-endpoint", "http://d"], &[]).as_deref(), Some("\"http://d\""));
    assert_eq!(collector(&["--otlp-traces-endpoint", ""], &[]).as_deref(), Some("\"\""));
    let empty = &[("TAPER_OTLP_TRACES_ENDPOINT", ""), ("TAPER_KV_MEMORY", ""), ("TAPER_PORT", "")];
    assert_eq!(collector(&[], empty), collector(&[], &[]));
    let key = path.to_str().expect("UTF-8");
    for (args, variables, says) in [
        (&["--tls-cert", key][..], &[][..], "tls_cert needs tls_key"),
        (&["--tls-cert", key, "--tls-key", key], &[], "shown.toml with"),
        (&["--otlp-traces-endpoint", "grpc://c:4317"], &[], "otlp_traces_endpoint must be like http://localhost:4318"),
        (&[], &[("OTEL_EXPORTER_OTLP_ENDPOINT", "localhost:4318")], "otlp_traces_endpoint must be like"),
        (
            &["--otlp-traces-endpoint", "http://c:4318"],
            &[("OTEL_EXPORTER_OTLP_HEADERS", "hidden")],
            "OTEL_EXPORTER_OTLP_HEADERS: must be name=value, with commas between them",
        ),
        (&[], &[("TAPER_QUEUE", "0")], "queue is 0; must be at least 1"),
        (&[], &[("TAPER_QEUE", "1")], "TAPER_QEUE: no setting is called `qeue`; did you mean `queue`?"),
        (&["--cors-origins", "nobody"], &[], "cors_origins"),
    ] {
        let (code, out, error) = check(args, variables);
        assert_eq!((code, out.as_str(), error.lines().count()), (Some(2), "", 1), "{error}");
        assert!(error.contains(says), "{error}");
    }
}

#[test]
fn a_log_that_cannot_be_is_told_of() {
    for (wanted, says) in
        [("taper=loud", "RUST_LOG cannot be read, and the default is used: "), ("taper=info", ""), ("", "")]
    {
        let mut command = Command::new(env!("CARGO_BIN_EXE_taper"));
        let output = command.args(["config", "check"]).env("RUST_LOG", wanted).output().expect("the program starts");
        let error = String::from_utf8(output.stderr).expect("UTF-8");
        assert!(output.status.success() && error.contains(says) && error.is_empty() == says.is_empty(), "{error}");
    }
}

#[test]
fn training_that_cannot_be() {
    let train = |rest: &[&'static str]| [&["train", "kmeans", "--out", "nowhere"][..], rest].concat();
    fails_in_one_line(&train(&["--memory", "many"]), "--memory");
    fails_in_one_line(&train(&["--kv-dtype", "f16"]), "--kv-dtype");
    fails_in_one_line(&train(&["--model", "no-such-model"]), "no-such-model");
    fails(&train(&["--layers", "9-7"]), "3,7-9");
    fails(&train(&["--hidden", "8"]), "--hidden");
    fails(&["train", "saap"], "--out");
    fails(&["train", "sample_attention", "--out", "nowhere", "--cra", "1.5"], "--cra");
    fails(&["train", "minference", "--out", "nowhere", "--keys", "many"], "--keys");
    fails(&["train", "santa"], "santa");
}

#[test]
fn methods_are_listed_with_their_parameters_and_presets() {
    let run = |args: &[&str]| {
        let output = Command::new(env!("CARGO_BIN_EXE_taper")).args(args).output().expect("the program starts");
        assert!(output.status.success());
        String::from_utf8(output.stdout).expect("UTF-8")
    };
    let text = run(&["methods"]);
    for word in [
        "decode vattention",
        "prefill delta",
        "delta-vattention",
        "[greater than 0 and less than 1] [default: 0.1]",
        "[one of 4, 8, 16, 32, 64] [default: 16]",
        "\"lemma\", \"denominator\"] [default: \"chi2\"]",
    ] {
        assert!(text.contains(word), "{word}");
    }
    // A parameter is one line, however long what is said of it.
    let mut parameters = text.lines().filter(|line| line.contains("[default: "));
    assert!(parameters.all(|line| line.starts_with("    ")), "{text}");
    let json: serde_json::Value = serde_json::from_str(&run(&["methods", "--json"])).expect("JSON");
    assert_eq!((&json["object"], &json["default"]["decode"]["method"]), (&"list".into(), &"dense".into()));
    assert!(json["data"].as_array().expect("a list").iter().all(|m| m["parameters"].is_object()));
    assert_eq!(json["schema"]["type"], "object");
}
