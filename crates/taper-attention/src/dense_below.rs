//! Contexts too short to be worth choosing from: a parameter of every decode method but the dense one.

use crate::method::{Choice, DecodeMethod, DecodeStep, KeyIndex};
use crate::methods::is_dense;
use crate::spec::Chosen;
use candle_core::Result;
use serde_json::{Value, json};
use std::sync::Arc;
use taper_kernels::decode::{DecodeRow, Selection};

/// Its name.
pub(crate) const FIELD: &str = "dense_below";

/// The most that it can be.
pub const MOST: usize = 1_048_576;

/// Its JSON Schema.
pub(crate) fn property() -> Value {
    json!({
        "description": "Rows that see fewer tokens, within the model's window if it has one, read all of them: where choosing costs more than it saves. Where it is not said, the server's `--dense-below` holds, but for drafts and for the method `within` which `santa` draws.",
        "type": "integer", "minimum": 0, "maximum": MOST, "default": 0,
    })
}

/// What a method's object, which was checked, says of it.
pub(crate) fn least(value: &Value) -> Option<usize> {
    value[FIELD].as_f64().map(|least| least as usize)
}

/// The method for contexts of so many tokens and more, which its object says.
pub(crate) fn over(chosen: Chosen<dyn DecodeMethod>, least: usize) -> Chosen<dyn DecodeMethod> {
    let Chosen { name, mut json, method } = chosen;
    json[FIELD] = json!(least);
    let method = if least == 0 { method } else { Arc::new(Below { least, method }) };
    Chosen { name, json, method }
}

/// The same where the request says nothing of it; dense attention stays what it is.
pub(crate) fn by_default(chosen: Chosen<dyn DecodeMethod>, least: usize) -> Chosen<dyn DecodeMethod> {
    let open = least > 0 && !is_dense(&chosen) && chosen.json.get(FIELD).is_none();
    if open { over(chosen, least) } else { chosen }
}

#[derive(Debug)]
struct Below {
    least: usize,
    method: Arc<dyn DecodeMethod>,
}

impl Below {
    fn few(&self, row: &DecodeRow) -> bool {
        row.visible.len() < self.least
    }
}

impl DecodeMethod for Below {
    fn select(&self, step: &DecodeStep) -> Result<Choice> {
        step.by_share(|row| self.few(row), |step, few| if *few { Ok(step.dense()) } else { self.method.select(step) })
    }

    fn promise(&self) -> Option<(f64, f64)> {
        self.method.promise()
    }

    fn reads_all(&self, keys: usize) -> bool {
        keys < self.least || self.method.reads_all(keys)
    }

    fn indices(&self) -> Vec<&dyn KeyIndex> {
        self.method.indices()
    }

    fn may_lack(&self, keys: usize) -> usize {
        self.method.may_lack(keys)
    }

    fn ahead(&self) -> bool {
        self.method.ahead()
    }

    fn dense_layers(&self) -> usize {
        self.method.dense_layers()
    }

    fn indexed_from(&self) -> usize {
        self.method.indexed_from()
    }

    fn plain(&self, rows: &[DecodeRow], kv_heads: usize) -> Option<Selection> {
        match rows.iter().filter(|row| self.few(row)).count() {
            0 => self.method.plain(rows, kv_heads),
            few => (few == rows.len()).then(|| Selection::dense(rows.len(), kv_heads)),
        }
    }

    fn host_only(&self) -> Option<String> {
        self.method.host_only()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::artifacts::Artifacts;
    use crate::methods;

    fn method(least: usize) -> Chosen<dyn DecodeMethod> {
        let value = json!({ "method": "streaming_llm", "sink": 0, "window": 2, FIELD: least });
        methods::decode(&value, "decode", &Artifacts::default()).unwrap()
    }

    #[test]
    fn short_rows_read_everything_and_longer_ones_what_the_method_says() {
        let (table, method) = ([0u32], method(5));
        let row = |end| DecodeRow { visible: 0..end, table: &table };
        let counts = |rows: &[DecodeRow]| Some(method.method.plain(rows, 1)?.counts(rows).unwrap());
        assert_eq!(counts(&[row(4)]), Some(vec![4]));
        assert_eq!(counts(&[row(5)]), Some(vec![2]));
        // What is not the same for all is chosen layer by layer.
        assert_eq!(counts(&[row(4), row(5)]), None);
        // Within a model's window a row sees no more than that.
        let windowed = |start| DecodeRow { visible: start..10, table: &table };
        assert_eq!((counts(&[windowed(6)]), counts(&[windowed(5)])), (Some(vec![4]), Some(vec![2])));
        assert!(method.method.reads_all(4) && !method.method.reads_all(5));
        assert_eq!(method.json, json!({ "method": "streaming_llm", "sink": 0, "window": 2, FIELD: 5 }));
        // What is said stays said, so that no default takes its place.
        assert_eq!(
            super::tests::method(0).json,
            json!({ "method": "streaming_llm", "sink": 0, "window": 2, FIELD: 0 })
        );
    }

    #[test]
    fn a_mistake_names_the_field() {
        let error = |value: Value| {
            let error = methods::decode(&value, "decode", &Artifacts::default()).unwrap_err();
            format!("{}: {}", error.path, error.message)
        };
        let bad = error(json!({ "method": "quest", FIELD: -1 }));
        assert_eq!(bad, "decode.dense_below: must be a whole number at least 0 and at most 1048576; got -1");
        let near = error(json!({ "method": "quest", "dense_bellow": 5 }));
        let message =
            "did you mean `dense_below`?; quest takes k, sink, window, dense_layers, page, ahead, dense_below";
        assert_eq!(near, format!("decode.dense_bellow: unknown field `dense_bellow`, {message}"));
        let dense = error(json!({ "method": "dense", FIELD: 1 }));
        assert_eq!(dense, "decode.dense_below: unknown field `dense_below`; dense takes no parameters");
    }
}
