//! `taper methods`: what a request may choose from.

use crate::args::MethodsArgs;
use crate::preset::Presets;
use crate::talk;
use anyhow::Result;
use serde_json::Value;
use taper_attention::{Artifacts, AttentionSpec};

/// Prints the methods and presets.
///
/// # Errors
/// A terminal that is gone.
pub fn run(args: &MethodsArgs) -> Result<()> {
    if args.json {
        let mut document = AttentionSpec::default().document(0);
        document["presets"] = serde_json::to_value(Presets::read(None)?.specs(&Artifacts::default())?)?;
        talk::print(&serde_json::to_string_pretty(&document)?)?;
        talk::print("\n")?;
        return Ok(());
    }
    let mut out = String::new();
    for method in taper_attention::catalogue() {
        out.push_str(&format!("{} {}\n  {}\n", method.phase, method.name, method.summary));
        let parameters = method.parameters["properties"].as_object().cloned().unwrap_or_default();
        for (name, schema) in parameters {
            let about = schema["description"].as_str().unwrap_or_default().replace('\n', " ");
            let valid = taper_attention::valid_values(&schema).map_or(String::new(), |valid| format!(" [{valid}]"));
            let default = match &schema["default"] {
                Value::Null => String::new(),
                value => format!(" [default: {value}]"),
            };
            out.push_str(&format!("    {name:<14} {about}{valid}{default}\n"));
        }
        for learnt in &method.artifacts {
            let when = if learnt.needed { "needs" } else { "may read" };
            out.push_str(&format!("  {when} the artefact {}, which `{}` makes\n", learnt.file, learnt.made_by));
        }
        out.push_str(&format!("  source: {}\n\n", method.source));
    }
    out.push_str("presets for --attention\n");
    for (name, about) in Presets::read(None)?.names() {
        out.push_str(&format!("    {name:<18} {about}\n"));
    }
    talk::print(&out)?;
    Ok(())
}
