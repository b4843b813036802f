//! Methods of Python's texts and lists that templates call and the engine's own set lacks.

use minijinja::value::{Kwargs, Value, ValueKind, from_args};
use minijinja::{Error, ErrorKind};

/// Calls one of them; none where the value has no such method here.
pub(super) fn call(value: &Value, method: &str, args: &[Value]) -> Option<Result<Value, Error>> {
    match (value.as_str(), method) {
        (Some(text), "rsplit") => Some(rsplit(text, args)),
        (Some(text), "removeprefix") => Some(one(args).map(|part| text.strip_prefix(part).unwrap_or(text).into())),
        (Some(text), "removesuffix") => Some(one(args).map(|part| text.strip_suffix(part).unwrap_or(text).into())),
        // Where the padding is odd, Python has the character more on the left of an odd width.
        (Some(text), "center") => Some(pad(text, args, |pad, width| pad / 2 + (pad & width & 1))),
        (Some(text), "ljust") => Some(pad(text, args, |_, _| 0)),
        (Some(text), "rjust") => Some(pad(text, args, |pad, _| pad)),
        (Some(text), "index") => Some(text_index(text, args)),
        (None, "index") if value.kind() == ValueKind::Seq => Some(list_index(value, args)),
        _ => None,
    }
}

fn wrong(reason: impl Into<String>) -> Error {
    Error::new(ErrorKind::InvalidOperation, reason.into())
}

/// The one argument, a text.
fn one(args: &[Value]) -> Result<&str, Error> {
    let (text,) = from_args(args)?;
    Ok(text)
}

/// Pads to a width in characters; `left` says how much of the padding stands before the text.
fn pad(text: &str, args: &[Value], left: impl Fn(usize, usize) -> usize) -> Result<Value, Error> {
    let (width, fill): (i64, Option<&str>) = from_args(args)?;
    let fill = fill.unwrap_or(" ");
    if fill.chars().count() != 1 {
        return Err(wrong("the fill must be one character"));
    }
    let width = usize::try_from(width).unwrap_or(0);
    let pad = width.saturating_sub(text.chars().count());
    let left = if pad > 0 { left(pad, width) } else { 0 };
    Ok(Value::from(format!("{}{text}{}", fill.repeat(left), fill.repeat(pad - left))))
}

fn rsplit(text: &str, args: &[Value]) -> Result<Value, Error> {
    let (sep, most, named): (Option<Value>, Option<i64>, Kwargs) = from_args(args)?;
    let sep = sep.or(named.get("sep")?).filter(|sep| !sep.is_none());
    let most = most.or(named.get("maxsplit")?).unwrap_or(-1);
    named.assert_all_used()?;
    let most = usize::try_from(most).unwrap_or(usize::MAX);
    let mut parts: Vec<&str> = match &sep {
        None => by_whitespace(text, most),
        Some(sep) => match sep.as_str() {
            Some("") => return Err(wrong("empty separator")),
            Some(sep) => text.rsplitn(most.saturating_add(1), sep).collect(),
            None => return Err(wrong("the separator must be a text")),
        },
    };
    parts.reverse();
    Ok(parts.into_iter().map(Value::from).collect())
}

/// Words from the end on, and before the last cut what is left.
fn by_whitespace(text: &str, most: usize) -> Vec<&str> {
    let mut parts = Vec::new();
    let mut rest = text.trim_end();
    while !rest.is_empty() {
        let cut = rest.char_indices().rev().find(|(_, c)| c.is_whitespace()).filter(|_| parts.len() < most);
        let start = cut.map_or(0, |(at, c)| at + c.len_utf8());
        parts.push(&rest[start..]);
        rest = rest[..start].trim_end();
    }
    parts
}

fn text_index(text: &str, args: &[Value]) -> Result<Value, Error> {
    let at = text.find(one(args)?).ok_or_else(|| wrong("substring not found"))?;
    Ok(Value::from(text[..at].chars().count()))
}

fn list_index(list: &Value, args: &[Value]) -> Result<Value, Error> {
    let (wanted, start): (&Value, Option<usize>) = from_args(args)?;
    for (at, item) in list.try_iter()?.enumerate().skip(start.unwrap_or(0)) {
        if item == *wanted {
            return Ok(Value::from(at));
        }
    }
    Err(wrong("the value is not in the list"))
}
