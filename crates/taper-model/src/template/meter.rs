//! What a template may cost. A template comes with a model's file, and a few words of it can ask for more time, memory or stack
//! than there is: a text that doubles in a loop, a list within a list within a list.
//!
//! Steps are counted by the engine (its fuel). Bytes are counted here, before they are made: of everything that is printed, and
//! of what goes into operators, slices, filters, methods and functions, the larger of which cost something even if nothing comes
//! out of them.
//! What remains, long work on texts within these bounds, ends at a deadline (`apart`).

use super::{methods, python};
use minijinja::functions;
use minijinja::machinery::{self, CompiledTemplate, Instruction, Instructions, TemplateConfig};
use minijinja::value::{Kwargs, Rest, Value, ValueKind};
use minijinja::{AutoEscape, Environment, Error, ErrorKind, State, context};
use std::collections::BTreeMap;
use std::sync::Arc;

/// Bytes that a conversation's rendering may make: some hundred times the longest context.
const BYTES_MAX: usize = 256 << 20;

/// Steps of the engine: some hundred are a message's.
const STEPS_MAX: usize = 1_000_000;

/// Bytes of a template's own text that may be printed: of these the engine does not ask.
const RAW_MAX: usize = 1 << 30;

/// Levels of lists and mappings.
const DEPTH_MAX: usize = 200;

/// Of indentation and the like.
const WIDTH_MAX: i64 = 1000;

/// Characters of a width and a precision of four digits.
const WIDEST: usize = 20_000;

/// What a place in a list counts for, beside what stands in it.
const PLACE: usize = 32;

/// Filters that look at no more than one element.
const FREE: [&str; 6] = ["count", "d", "default", "defined", "first", "length"];

/// Filters that hand on the elements of what they are given.
const SHALLOW: [&str; 20] = [
    "attr",
    "batch",
    "chain",
    "dictsort",
    "groupby",
    "items",
    "last",
    "list",
    "max",
    "min",
    "reject",
    "rejectattr",
    "reverse",
    "select",
    "selectattr",
    "slice",
    "sort",
    "sum",
    "unique",
    "zip",
];

/// Filters that make new texts.
const DEEP: [&str; 25] = [
    "abs",
    "bool",
    "capitalize",
    "e",
    "escape",
    "float",
    "format",
    "indent",
    "int",
    "join",
    "lines",
    "lower",
    "map",
    "none",
    "pprint",
    "replace",
    "round",
    "safe",
    "split",
    "string",
    "title",
    "tojson",
    "trim",
    "upper",
    "urlencode",
];

/// Operators, under names that no template can write as filters.
const OPERATORS: [(&str, Instruction<'_>); 3] =
    [("+", Instruction::Add), ("*", Instruction::Mul), ("in", Instruction::In)];

/// The same of a part of a text or list.
const SLICE: &str = "[:]";

/// Bytes that are left of `BYTES_MAX`.
struct Left(usize);

/// Takes bytes from what is left.
pub(super) fn charge(state: &mut State<'_, '_>, bytes: usize) -> Result<(), Error> {
    let left = state.get_or_insert_extension(Left(BYTES_MAX));
    left.0 = left.0.checked_sub(bytes).ok_or_else(|| {
        let reason = format!("makes more than {BYTES_MAX} bytes of text and lists for one conversation");
        Error::new(ErrorKind::InvalidOperation, reason)
    })?;
    Ok(())
}

/// An environment in which what `plain` does is counted.
pub(super) fn metered(plain: Environment<'static>) -> Environment<'static> {
    let mut environment = plain.clone();
    let plain = Arc::new(plain);
    for name in FREE.iter().chain(&SHALLOW).chain(&DEEP).copied() {
        let plain = plain.clone();
        environment.add_filter(name, move |state: &mut State<'_, '_>, mut args: Rest<Value>, named: Kwargs| {
            if named.args().next().is_some() {
                args.push(Value::from(named));
            }
            if !FREE.contains(&name) {
                with_lengths(state, args.iter_mut())?;
            }
            charge_call(state, name, &args)?;
            match args.get(1).and_then(Value::as_str).filter(|_| name == "map") {
                // What it has done to each is counted for each.
                Some(filter) => {
                    let one = |item| state.apply_filter(filter, &[&[item], &args[2..]].concat());
                    args[0].try_iter()?.map(one).collect::<Result<Vec<_>, _>>().map(Value::from)
                }
                None => plain.empty_state().apply_filter(name, &args),
            }
        });
    }
    for (name, instruction) in OPERATORS {
        let operate = operator(&plain, &["a", "b"], instruction);
        environment.add_filter(name, move |state: &mut State<'_, '_>, mut a: Value, mut b: Value| {
            if name != "in" {
                with_lengths(state, [&mut a, &mut b])?;
            }
            let times = if name == "*" { a.as_usize().or(b.as_usize()).unwrap_or(1) } else { 1 };
            for value in [&a, &b] {
                charge(state, size(value).saturating_mul(times))?;
            }
            operate(context!(a, b))
        });
    }
    environment.add_filter("~", |state: &mut State<'_, '_>, a: Value, b: Value| {
        charge_deep(state, &a, 0)?;
        charge_deep(state, &b, 0)?;
        Ok(python::text(&a) + &python::text(&b))
    });
    let modulo = operator(&plain, &["a", "b"], Instruction::Rem);
    environment.add_filter("%", move |state: &mut State<'_, '_>, a: Value, b: Value| match a.as_str() {
        Some(format) => {
            charge_call(state, "format", &[a.clone(), b.clone()])?;
            python::percent(format, &b)
        }
        None => modulo(context!(a, b)),
    });
    let slice = operator(&plain, &["of", "start", "stop", "step"], Instruction::Slice);
    environment.add_filter(
        SLICE,
        move |state: &mut State<'_, '_>, mut of: Value, start: Value, stop: Value, step: Value| {
            with_lengths(state, [&mut of])?;
            // From the end on a text's letters are taken apart first.
            let apart = if i64::try_from(step.clone()).is_ok_and(|step| step < 0) { size_of::<char>() } else { 1 };
            charge(state, size(&of).saturating_mul(apart))?;
            slice(context!(of, start, stop, step))
        },
    );
    // Those that copy a mapping.
    let (dict, namespace) = (Value::from_function(functions::dict), Value::from_function(functions::namespace));
    for (name, function) in [("dict", dict), ("namespace", namespace)] {
        environment.add_function(name, move |state: &mut State<'_, '_>, mut args: Rest<Value>, named: Kwargs| {
            if named.args().next().is_some() {
                args.push(Value::from(named));
            }
            with_lengths(state, args.iter_mut())?;
            for value in args.iter() {
                charge(state, size(value))?;
            }
            function.call(state, &args)
        });
    }
    // It prints all that there is, as often as it is asked.
    environment.remove_global("debug");
    environment.set_unknown_method_callback(|state, value, method, args| {
        let mut all: Vec<Value> = std::iter::once(value.clone()).chain(args.iter().cloned()).collect();
        with_lengths(state, &mut all)?;
        charge_call(state, method, &all)?;
        let (value, args) = (&all[0], &all[1..]);
        if let Some(called) = methods::call(value, method, args) {
            return called;
        }
        minijinja_contrib::pycompat::unknown_method_callback(state, value, method, args)
    });
    environment
}

/// What the engine does for an operator, of operands by these names. It stands in no line, so that an error is told of the
/// template's.
fn operator(
    plain: &Arc<Environment<'static>>,
    operands: &[&'static str],
    operator: Instruction<'static>,
) -> impl Fn(Value) -> Result<Value, Error> + Send + Sync + use<> {
    let (plain, mut instructions) = (plain.clone(), Instructions::new("operator", ""));
    for instruction in operands.iter().map(|name| Instruction::Lookup(name)).chain([operator]) {
        instructions.add(instruction);
    }
    move |operands| {
        let (mut printed, blocks) = (String::new(), BTreeMap::new());
        let mut out = machinery::make_string_output(&mut printed);
        let done = machinery::eval(&plain, &instructions, operands, &blocks, &mut out, AutoEscape::None)?;
        Ok(done.0.unwrap_or_default())
    }
}

/// Compiles a template's text, and has what the engine would do by itself done by the filters above.
pub(super) fn compile<'a>(
    name: &'a str,
    text: &'a str,
    config: &TemplateConfig,
) -> Result<CompiledTemplate<'a>, Error> {
    let mut template = CompiledTemplate::new(name, text, config)?;
    let blocks = template.blocks.values_mut();
    for instructions in std::iter::once(&mut template.instructions).chain(blocks) {
        let mut at = 0;
        while let Some(instruction) = instructions.get_mut(at) {
            let filter = match instruction {
                Instruction::Add => Some(("+", 2)),
                Instruction::Mul => Some(("*", 2)),
                Instruction::In => Some(("in", 2)),
                Instruction::StringConcat => Some(("~", 2)),
                Instruction::Rem => Some(("%", 2)),
                Instruction::Slice => Some((SLICE, 4)),
                // The engine would walk through the list before anyone could count it.
                Instruction::UnpackLists(_) => {
                    return Err(Error::new(
                        ErrorKind::InvalidOperation,
                        "a call's arguments are no list (`*list`) here",
                    ));
                }
                _ => None,
            };
            if let Some((name, args)) = filter {
                // The last number says that the engine is not to remember which filter it is.
                *instruction = Instruction::ApplyFilter(name, Some(args), u8::MAX);
            }
            at += 1;
        }
    }
    Ok(template)
}

/// Steps that a template may take: fewer, the longer the pieces are that it may print at each.
pub(super) fn steps(template: &CompiledTemplate<'_>) -> u64 {
    let longest = |instructions: &Instructions<'_>| {
        let all = (0..).map_while(|at| instructions.get(at));
        let raw = all.filter_map(|i| if let Instruction::EmitRaw(text) = i { Some(text.len()) } else { None });
        raw.max().unwrap_or(0)
    };
    let longest = template.blocks.values().map(longest).max().unwrap_or(0).max(longest(&template.instructions));
    (RAW_MAX / longest.max(1)).min(STEPS_MAX) as u64
}

/// Runs what was compiled.
pub(super) fn render(
    environment: &Environment<'_>,
    template: &CompiledTemplate<'_>,
    context: Value,
) -> Result<String, Error> {
    let mut text = String::new();
    let mut out = machinery::make_string_output(&mut text);
    machinery::eval(environment, &template.instructions, context, &template.blocks, &mut out, AutoEscape::None)?;
    Ok(text)
}

/// Makes lists of what can be walked through but has no length, such as a text and a list in a chain, and counts their
/// places: nobody could say before how much comes of it.
fn with_lengths<'a>(state: &mut State<'_, '_>, values: impl IntoIterator<Item = &'a mut Value>) -> Result<(), Error> {
    for value in values {
        if value.kind() == ValueKind::Iterable && value.len().is_none() {
            let one = |item| charge(state, PLACE).map(|()| item);
            *value = value.try_iter()?.map(one).collect::<Result<Vec<_>, _>>()?.into();
        }
    }
    Ok(())
}

/// Counts what goes into a filter or a method, and what may come out of those that make more of it.
fn charge_call(state: &mut State<'_, '_>, name: &str, args: &[Value]) -> Result<(), Error> {
    let text = |i: usize| args.get(i).and_then(Value::as_str).unwrap_or_default();
    // What an indentation is where nothing is said of it.
    let (mut widest, mut between) = (4, 0);
    if matches!(name, "batch" | "center" | "indent" | "ljust" | "rjust" | "round" | "slice" | "tojson") {
        for value in args.iter().skip(1) {
            let named = Kwargs::try_from(value.clone()).ok();
            let separators = named.as_ref().and_then(|named| named.peek::<Vec<String>>("separators").ok());
            between += separators.iter().flatten().map(String::len).sum::<usize>();
            let named = named.iter().flat_map(|kwargs| kwargs.args().filter_map(|key| kwargs.peek::<Value>(key).ok()));
            for number in named.chain([value.clone()]).filter(|v| v.kind() == ValueKind::Number) {
                match i64::try_from(number.clone()) {
                    Ok(n) if (-WIDTH_MAX..=WIDTH_MAX).contains(&n) => widest = widest.max(n.unsigned_abs() as usize),
                    _ => {
                        let reason = format!("{name} takes numbers from -{WIDTH_MAX} to {WIDTH_MAX}, not {number}");
                        return Err(Error::new(ErrorKind::InvalidOperation, reason));
                    }
                }
            }
        }
    }
    let more = match name {
        "join" => {
            // A filter joins its first argument by its second, a method the other way about.
            let (first, second) = (args.first(), args.get(1));
            let places = |value: Option<&Value>| value.and_then(Value::len).unwrap_or(0);
            let between = places(first).saturating_mul(text(1).len()).max(places(second).saturating_mul(text(0).len()));
            between.saturating_add(text(0).len().saturating_mul(PLACE))
        }
        "replace" => (text(0).len() / text(1).len().max(1) + 1).saturating_mul(text(2).len()),
        "center" | "ljust" | "rjust" => WIDTH_MAX as usize * text(2).len().max(1),
        "indent" => text(0).lines().count().saturating_mul(widest),
        "format" if has_width(text(0)) => {
            let reason = "a format's width or precision takes at most four digits";
            return Err(Error::new(ErrorKind::InvalidOperation, reason));
        }
        "format" => text(0).matches(['%', '{']).count().saturating_mul(WIDEST),
        // Each part is a place in a list.
        "split" | "rsplit" => PLACE.saturating_mul(match args.get(1).map(|sep| (sep.is_none(), sep.as_str())) {
            None | Some((true, _)) => text(0).split_whitespace().count(),
            Some((_, Some(sep))) if !sep.is_empty() => text(0).matches(sep).count() + 1,
            Some(_) => text(0).len(),
        }),
        "lines" | "splitlines" => text(0).lines().count().saturating_mul(PLACE),
        // As is each letter of a text.
        "batch" | "list" | "map" | "max" | "min" | "reject" | "rejectattr" | "select" | "selectattr" | "slice"
        | "sum" | "unique" => text(0).len().saturating_mul(PLACE),
        // Beside what it is sorted by, of which there may be several.
        "groupby" | "sort" => {
            let by =
                args.iter().filter_map(|value| Kwargs::try_from(value.clone()).ok()?.peek::<String>("attribute").ok());
            let places = by.map(|by| by.matches(',').count() + 1).sum::<usize>() + 1;
            args.first().and_then(Value::len).unwrap_or(0).saturating_mul(PLACE).saturating_mul(places)
        }
        "chain" | "zip" => args.iter().filter_map(Value::as_str).map(str::len).sum::<usize>().saturating_mul(PLACE),
        _ => 0,
    };
    charge(state, more)?;
    if FREE.contains(&name) {
        return Ok(());
    }
    // Texts and lists are copied for each that is added to them; numbers start from one.
    let start = |(at, value): (usize, &Value)| match Kwargs::try_from(value.clone()) {
        Ok(named) => named.peek::<Value>("start").ok(),
        Err(_) => (at == 2).then(|| value.clone()),
    };
    let start = args.iter().enumerate().skip(1).find_map(start).filter(|_| name == "sum");
    if start.is_some_and(|start| start.kind() != ValueKind::Number) {
        for _ in 0..args[0].len().unwrap_or(0) {
            charge_deep(state, &args[0], 0)?;
        }
    }
    let layout = match name {
        "tojson" => Layout { between, indent: widest },
        "pprint" => Layout { between, indent: 4 },
        _ => Layout::default(),
    };
    for value in args {
        if SHALLOW.contains(&name) { charge(state, size(value))? } else { charge_laid_out(state, value, 0, layout)? }
    }
    Ok(())
}

/// What stands beside each place of a list or mapping that is printed.
#[derive(Debug, Clone, Copy, Default)]
struct Layout {
    /// Bytes.
    between: usize,
    /// And so many for each level.
    indent: usize,
}

/// Whether a format asks for a width or a precision of five digits.
fn has_width(format: &str) -> bool {
    let digits = |spec: &str| spec.split(|c: char| !c.is_ascii_digit()).any(|run| run.len() > 4);
    let spec = |rest: &str| rest.find(|c: char| !"#- +.,_<>^=0123456789".contains(c)).unwrap_or(rest.len());
    format.split(['%', ':']).skip(1).any(|rest| digits(&rest[..spec(rest)]))
}

/// Bytes of a text, places of a list.
fn size(value: &Value) -> usize {
    value.as_str().map_or_else(|| value.len().unwrap_or(0).saturating_mul(PLACE), str::len)
}

/// Counts all that a value holds, as often as it holds it, and refuses what is nested too deep to be walked through.
pub(super) fn charge_deep(state: &mut State<'_, '_>, value: &Value, depth: usize) -> Result<(), Error> {
    charge_laid_out(state, value, depth, Layout::default())
}

fn charge_laid_out(state: &mut State<'_, '_>, value: &Value, depth: usize, layout: Layout) -> Result<(), Error> {
    charge(state, PLACE + size(value) + layout.between + layout.indent * depth)?;
    if !matches!(value.kind(), ValueKind::Seq | ValueKind::Map | ValueKind::Iterable) {
        return Ok(());
    }
    // Macros and the like call themselves mappings.
    let Ok(keys) = value.try_iter() else { return Ok(()) };
    if depth > DEPTH_MAX {
        let reason = format!("nests lists and mappings more than {DEPTH_MAX} levels deep");
        return Err(Error::new(ErrorKind::InvalidOperation, reason));
    }
    for key in keys {
        if value.kind() == ValueKind::Map {
            charge(state, PLACE + size(&key))?;
            charge_laid_out(state, &value.get_item(&key)?, depth + 1, layout)?;
        } else {
            charge_laid_out(state, &key, depth + 1, layout)?;
        }
    }
    Ok(())
}
