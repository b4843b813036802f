//! `taper health`: asks a running server whether it is well, for images that have no curl.

use crate::args::HealthArgs;
use crate::settings::{ServeArgs, Settings};
use anyhow::{Context, Result, bail};
use reqwest::Url;
use std::net::IpAddr;
use std::time::Duration;

/// How long the server may take to answer.
const PATIENCE: Duration = Duration::from_secs(5);

/// Asks `/health` or `/ready`.
///
/// # Errors
/// No answer in five seconds, or another one than 200.
pub fn run(args: HealthArgs) -> Result<()> {
    let base = match args.url {
        Some(url) => given(&url)?,
        None => {
            let given = ServeArgs { config: args.config, ..ServeArgs::default() };
            own(&Settings::read(given, std::env::vars_os())?)
        }
    };
    let url = format!("{base}/{}", if args.ready { "ready" } else { "health" });
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(ask(&url)).context(url)
}

/// The address that was given, without a slash at its end.
fn given(url: &str) -> Result<String> {
    let parsed = Url::parse(url).ok().filter(|url| ["http", "https"].contains(&url.scheme()));
    parsed.with_context(|| format!("--url: {url:?} must be like http://127.0.0.1:8080"))?;
    Ok(url.trim_end_matches('/').to_owned())
}

async fn ask(url: &str) -> Result<()> {
    let http = reqwest::Client::builder().timeout(PATIENCE).danger_accept_invalid_certs(true).no_proxy().build()?;
    let answer = http.get(url).send().await.map_err(reqwest::Error::without_url)?;
    match answer.status().as_u16() {
        200 => Ok(()),
        // Whatever becomes of the rest, the status has come.
        status => {
            bail!("answers {status}: {}", answer.text().await.unwrap_or_else(|error| error.without_url().to_string()))
        }
    }
}

/// Where a server of these settings is, seen from its own machine.
fn own(settings: &Settings) -> String {
    let server = &settings.server;
    let scheme = if server.tls_cert.is_some() { "https" } else { "http" };
    let host = server.host.as_deref().unwrap_or("127.0.0.1");
    let host = match host.parse::<IpAddr>() {
        Ok(IpAddr::V4(ip)) if ip.is_unspecified() => "127.0.0.1".to_owned(),
        Ok(IpAddr::V6(ip)) if ip.is_unspecified() => "[::1]".to_owned(),
        Ok(IpAddr::V6(ip)) => format!("[{ip}]"),
        _ => host.to_owned(),
    };
    format!("{scheme}://{host}:{}", server.port.unwrap_or_default())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{BufRead, BufReader, Write};
    use std::net::TcpListener;

    #[test]
    fn a_server_is_where_its_settings_say() {
        for (variables, at) in [
            (vec![], "http://127.0.0.1:8080"),
            (vec![("TAPER_HOST", "0.0.0.0"), ("TAPER_PORT", "81")], "http://127.0.0.1:81"),
            (vec![("TAPER_HOST", "::")], "http://[::1]:8080"),
            (vec![("TAPER_HOST", "fe80::1")], "http://[fe80::1]:8080"),
            (vec![("TAPER_HOST", "taper.local"), ("TAPER_TLS_CERT", "a.pem")], "https://taper.local:8080"),
        ] {
            let variables = variables.into_iter().map(|(name, text)| (name.into(), text.into()));
            assert_eq!(own(&Settings::read(ServeArgs::default(), variables).unwrap()), at);
        }
    }

    #[test]
    fn only_200_is_well() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let url = format!("http://{}/", listener.local_addr().unwrap());
        let answers = ["200 OK", "503 Service Unavailable"];
        let server = std::thread::spawn(move || {
            answers.map(|answer| {
                let (mut stream, _) = listener.accept().unwrap();
                // All of it: a connection that ends with something unread is reset, and what was answered may be lost with it.
                let lines = BufReader::new(&stream).lines().map(Result::unwrap);
                let head: Vec<String> = lines.take_while(|line| !line.is_empty()).collect();
                write!(stream, "HTTP/1.1 {answer}\r\nconnection: close\r\ncontent-length: 4\r\n\r\nbusy").unwrap();
                head[0].clone()
            })
        });
        let asked = |ready| run(HealthArgs { url: Some(url.clone()), ready, config: None });
        asked(false).unwrap();
        assert!(format!("{:#}", asked(true).unwrap_err()).ends_with("answers 503: busy"));
        assert_eq!(server.join().unwrap(), ["GET /health HTTP/1.1", "GET /ready HTTP/1.1"]);
        let gone = format!("{:#}", asked(false).unwrap_err());
        assert_eq!(gone.matches(url.trim_end_matches('/')).count(), 1, "said once: {gone}");
        for url in ["127.0.0.1:8080", "localhost:8080", "nowhere"] {
            let error = run(HealthArgs { url: Some(url.into()), ready: false, config: None }).unwrap_err();
            assert_eq!(error.to_string(), format!("--url: {url:?} must be like http://127.0.0.1:8080"));
        }
    }
}
