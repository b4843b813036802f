//! The rules of the house that a program can check: arrows between crates, sizes, leftovers, sources of methods.

use anyhow::{Context, Result};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

/// The crates in the order of their arrows: each may use those to its right.
const ORDER: [&str; 8] = [
    "taper",
    "taper-server",
    "taper-eval",
    "taper-engine",
    "taper-model",
    "taper-attention",
    "taper-kv-cache",
    "taper-kernels",
];

/// Lines that a source file may have: about 600, and some for the one that is nearly there.
const FILE_LINES_MAX: usize = 700;

/// What must not be left behind. Spelt in halves, so that this file passes its own check.
const LEFTOVERS: [(&str, &str); 5] =
    [("dbg", "!("), ("todo", "!("), ("unimplemented", "!("), ("FIX", "ME"), ("#[ig", "nore")];

/// Every breach of a rule, one line each.
pub fn check(root: &Path) -> Result<Vec<String>> {
    let mut problems = arrows(root)?;
    for file in sources(root)? {
        let text = fs::read_to_string(root.join(&file)).with_context(|| format!("{}", file.display()))?;
        problems.extend(source(&file, &text));
    }
    Ok(problems)
}

/// Tracked and new files that git does not ignore, Rust and CUDA.
fn sources(root: &Path) -> Result<Vec<PathBuf>> {
    let args = ["ls-files", "--cached", "--others", "--exclude-standard", "*.rs", "*.cu", "*.cuh"];
    let output = Command::new("git").args(args).current_dir(root).output().context("git ls-files")?;
    let files = String::from_utf8(output.stdout)?;
    Ok(files.lines().map(PathBuf::from).filter(|file| root.join(file).exists()).collect())
}

fn source(file: &Path, text: &str) -> Vec<String> {
    let mut problems = Vec::new();
    let name = file.display();
    let lines = text.lines().count();
    if lines > FILE_LINES_MAX {
        problems.push(format!("{name}: {lines} lines; split it ({FILE_LINES_MAX} at most)"));
    }
    if file.extension().is_some_and(|e| e == "rs") && !text.trim_start().starts_with("//!") && !is_test(file) {
        problems.push(format!("{name}: begins without a `//!` line that says its job"));
    }
    for (a, b) in LEFTOVERS {
        let mark = format!("{a}{b}");
        problems.extend(
            text.lines()
                .enumerate()
                .filter(|(_, line)| line.contains(&mark))
                .map(|(i, _)| format!("{name}:{}: `{mark}` left behind", i + 1)),
        );
    }
    let methods = Path::new("crates/taper-attention/src/methods");
    if file.starts_with(methods)
        && !is_test(file)
        && !text.contains("source:")
        && file.file_name() != Some("mod.rs".as_ref())
    {
        problems.push(format!("{name}: a method without its source"));
    }
    problems
}

fn is_test(file: &Path) -> bool {
    file.file_name().is_some_and(|name| name.to_string_lossy().ends_with("tests.rs"))
        || file.components().any(|c| c.as_os_str() == "tests")
}

/// Dependencies that point backwards.
fn arrows(root: &Path) -> Result<Vec<String>> {
    let args = ["metadata", "--format-version", "1", "--no-deps", "--offline"];
    let output = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()))
        .args(args)
        .current_dir(root)
        .output()
        .context("cargo metadata")?;
    let metadata: serde_json::Value = serde_json::from_slice(&output.stdout).context("cargo metadata")?;
    let place = |name: &str| ORDER.iter().position(|&n| n == name);
    let mut problems = Vec::new();
    for package in metadata["packages"].as_array().context("packages")? {
        let name = package["name"].as_str().context("name")?;
        for dependency in package["dependencies"].as_array().context("dependencies")? {
            let uses = dependency["name"].as_str().context("name")?;
            // A dev-dependency on itself turns a crate's own test feature on.
            let backward = place(name).zip(place(uses)).is_some_and(|(from, to)| to <= from && name != uses);
            if backward {
                problems.push(format!("{name} uses {uses}: arrows go {}", ORDER.join(" -> ")));
            }
        }
    }
    Ok(problems)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn breaches_are_found() {
        let long = format!("//! A job.\n{}", "\n".repeat(FILE_LINES_MAX));
        assert_eq!(source(Path::new("a.rs"), &long).len(), 1);
        assert_eq!(source(Path::new("a.rs"), "fn main() {}\n").len(), 1);
        let leftover = format!("//! A job.\nfn f() {{ {}{}) }}\n", LEFTOVERS[1].0, LEFTOVERS[1].1);
        assert_eq!(
            source(Path::new("a.rs"), &leftover),
            [format!("a.rs:2: `{}{}` left behind", LEFTOVERS[1].0, LEFTOVERS[1].1)]
        );
        assert!(source(Path::new("a.rs"), "//! A job.\n").is_empty());
        assert_eq!(source(Path::new("crates/taper-attention/src/methods/x.rs"), "//! A method.\n").len(), 1);
    }
}
