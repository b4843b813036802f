//! Models that llama-gguf-split cut into files: the first has the metadata, each has tensors of its own.

use super::Gguf;
use crate::error::ModelError;
use std::collections::hash_map::Entry;

const COUNT: &str = "split.count";
const NUMBER: &str = "split.no";
const TENSORS: &str = "split.tensors.count";

/// What to do about a model whose parts are not all there.
const MERGE: &str = "llama-gguf-split --merge makes one file of all parts";

/// The names of all parts, of a name that is one part's: `name-00001-of-00003.gguf`.
pub(crate) fn parts(name: &str) -> Option<Vec<String>> {
    let (rest, count) = name.strip_suffix(".gguf")?.rsplit_once("-of-")?;
    let (prefix, number) = rest.rsplit_once('-')?;
    let of = |digits: &str| digits.parse::<u32>().ok().filter(|_| digits.len() == 5);
    let (number, count) = (of(number)?, of(count)?);
    let all = || (1..=count).map(|number| format!("{prefix}-{number:05}-of-{count:05}.gguf")).collect();
    (1..=count).contains(&number).then(all)
}

/// Takes in the tensors of the other parts, which lie beside the first.
pub(super) fn join(first: &mut Gguf) -> Result<(), ModelError> {
    let count = first.optional_u64(COUNT)?.unwrap_or(1);
    if count <= 1 {
        return Ok(());
    }
    let path = first.path().to_owned();
    let invalid = |field: &str, reason: String| Err(ModelError::invalid(&path, field, reason));
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    let Some(names) = parts(&name).filter(|names| names.len() as u64 == count) else {
        let reason =
            format!("is {count}, and by a name other than …-00001-of-{count:05}.gguf no part is found; {MERGE}");
        return invalid(COUNT, reason);
    };
    let number = first.u64(NUMBER)?;
    if number != 0 || *name != names[0] {
        return invalid(NUMBER, format!("is {number}, so this is not the first of {count} parts: give {}", names[0]));
    }
    if let Some(missing) = names.iter().find(|name| !path.with_file_name(name).exists()) {
        return invalid(COUNT, format!("is {count}, and {missing} is not beside this file; {MERGE}"));
    }
    for (number, name) in (0..).zip(&names).skip(1) {
        let part = Gguf::open_one(&path.with_file_name(name))?;
        for (field, ours) in [(COUNT, count), (NUMBER, number)] {
            let theirs = part.u64(field)?;
            if theirs != ours {
                return Err(ModelError::invalid(part.path(), field, format!("is {theirs} in place of {ours}")));
            }
        }
        for (tensor, mut info) in part.tensors {
            let Entry::Vacant(place) = first.tensors.entry(tensor) else {
                return Err(ModelError::invalid(&path.with_file_name(name), "tensors", "are in another part too"));
            };
            info.file = first.files.len();
            place.insert(info);
        }
        first.files.extend(part.files);
    }
    match first.optional_u64(TENSORS)? {
        Some(said) if said != first.tensors.len() as u64 => {
            invalid(TENSORS, format!("is {said}; the {count} parts have {}", first.tensors.len()))
        }
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_parts_name_tells_all_of_them() {
        let two = ["m-Q4-00001-of-00002.gguf".to_owned(), "m-Q4-00002-of-00002.gguf".to_owned()];
        assert_eq!(parts("m-Q4-00002-of-00002.gguf"), Some(two.to_vec()));
        for other in ["m.gguf", "m-00003-of-00002.gguf", "m-00000-of-00002.gguf", "m-1-of-2.gguf", "m-00001-of-00002"] {
            assert_eq!(parts(other), None, "{other}");
        }
    }
}
