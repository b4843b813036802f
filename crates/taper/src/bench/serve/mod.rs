//! `taper bench serve`: load on any server that speaks OpenAI's protocol, and what its clients saw.
//!
//! Closed loop: so many clients, each of which sends its next request when the last one has ended. Open loop: requests
//! come at random times at a rate, whether or not the server keeps up.

mod args;
mod client;
mod figures;
mod plan;
mod plot;

pub use args::BenchServeArgs;

use crate::{eval, talk};
use anyhow::{Context, Result, bail};
use client::{Client, Seen};
use figures::{Figures, Target};
use indicatif::{ProgressBar, ProgressStyle};
use plan::{Arrivals, Plan};
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::sync::{Semaphore, mpsc};

/// Sends the load and prints what came of it.
///
/// # Errors
/// The argument at fault, a server that is not there, or a file that cannot be written.
pub fn run(args: BenchServeArgs) -> Result<()> {
    let plan = Plan::new(&args)?;
    let target = args.goodput.as_deref().map(Target::parse).transpose()?;
    eval::writable("json", args.json.as_deref())?;
    eval::writable("plot", args.plot.as_deref())?;
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?;
    let Load { model, seen, elapsed } = runtime.block_on(load(&args, &plan))?;
    let figures = Figures::new(&seen, elapsed, target);
    if let Some(path) = &args.json {
        let text = serde_json::to_string_pretty(&figures.json(&args, &model, &seen))?;
        std::fs::write(path, text + "\n").with_context(|| path.display().to_string())?;
    }
    if let Some(path) = &args.plot {
        std::fs::write(path, plot::svg(&figures)).with_context(|| path.display().to_string())?;
    }
    talk::print(&figures.table())?;
    if figures.completed == 0 && figures.cancelled == 0 {
        bail!("no request was answered: {}", figures.errors.keys().next().map_or("none was sent", |error| error));
    }
    Ok(())
}

/// What was asked, and what came of it.
struct Load {
    model: String,
    seen: Vec<Seen>,
    elapsed: Duration,
}

async fn load(args: &BenchServeArgs, plan: &Plan) -> Result<Load> {
    let client = Arc::new(Client::new(args).await?);
    for request in plan.warm_up() {
        let seen = client.send(request, Instant::now()).await;
        if let Some(error) = seen.error {
            bail!("{}: {error}", args.url);
        }
    }
    let bar = ProgressBar::new(plan.requests.len() as u64);
    bar.set_style(ProgressStyle::with_template("{bar:40} {pos}/{len} requests, {elapsed}")?);
    let (results, mut received) = mpsc::unbounded_channel();
    // In a closed loop as many requests are out as there are clients; in an open one as many as have come.
    let clients = match plan.arrivals {
        Arrivals::Closed(clients) => clients,
        Arrivals::Open(_) => Semaphore::MAX_PERMITS,
    };
    let permits = Arc::new(Semaphore::new(clients));
    let started = Instant::now();
    for request in plan.requests.clone() {
        let permit = Arc::clone(&permits).acquire_owned().await?;
        if let Arrivals::Open(_) = plan.arrivals {
            tokio::time::sleep_until((started + request.at).into()).await;
        }
        let (client, results, bar) = (Arc::clone(&client), results.clone(), bar.clone());
        tokio::spawn(async move {
            let seen = client.send(request, started).await;
            drop(permit);
            bar.inc(1);
            _ = results.send(seen);
        });
    }
    drop(results);
    let mut seen = Vec::new();
    while let Some(one) = received.recv().await {
        seen.push(one);
    }
    bar.finish_and_clear();
    seen.sort_by_key(|one| one.number);
    Ok(Load { model: client.model.clone(), seen, elapsed: started.elapsed() })
}

#[cfg(test)]
mod tests;
