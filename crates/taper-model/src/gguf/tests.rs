use super::*;

/// A file's header: magic, version, counts, then what follows.
fn header(version: u32, tensors: u64, entries: u64, rest: &[u8]) -> Vec<u8> {
    let mut bytes = b"GGUF".to_vec();
    bytes.extend(version.to_le_bytes());
    bytes.extend(tensors.to_le_bytes());
    bytes.extend(entries.to_le_bytes());
    bytes.extend(rest);
    bytes
}

fn string(text: &str) -> Vec<u8> {
    [&(text.len() as u64).to_le_bytes(), text.as_bytes()].concat()
}

fn open(bytes: &[u8]) -> Result<Gguf, ModelError> {
    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(file.path(), bytes).unwrap();
    Gguf::open(file.path())
}

#[test]
fn absurd_lengths_end_at_the_end_of_the_file() {
    let huge = u64::MAX.to_le_bytes();
    let entry = |kind: u32, rest: &[u8]| [&string("key")[..], &kind.to_le_bytes(), rest].concat();
    let array = |kind: u32| entry(9, &[&kind.to_le_bytes()[..], &huge].concat());
    let tensor = |rank: u32, dimension: u64, kind: u32, offset: u64| {
        let mut bytes = string("weight");
        bytes.extend(rank.to_le_bytes());
        for _ in 0..rank.min(8) {
            bytes.extend(dimension.to_le_bytes());
        }
        bytes.extend(kind.to_le_bytes());
        bytes.extend(offset.to_le_bytes());
        bytes
    };
    for (what, bytes, part) in [
        ("no magic", b"GGML".to_vec(), "magic: this is not a GGUF file"),
        ("version 1", header(1, 0, 0, &[]), "version: GGUF version 1 is not supported"),
        ("cut counts", b"GGUF\x03\0\0\0\x01".to_vec(), "tensor_count: the file ends"),
        ("many entries", header(3, 0, u64::MAX, &[]), "metadata entry 0: the file ends"),
        ("many tensors", header(3, u64::MAX, 0, &[]), "tensor entry 0: the file ends"),
        ("long key", header(3, 0, 1, &huge), "metadata entry 0: the file ends"),
        ("odd key", header(3, 0, 1, &[&2u64.to_le_bytes()[..], &[0xff, 0xfe]].concat()), "is not UTF-8"),
        ("long string", header(3, 0, 1, &entry(8, &huge)), "key: the file ends"),
        ("long numbers", header(3, 0, 1, &array(4)), "key: is absurdly long"),
        ("long bytes", header(3, 0, 1, &array(0)), "key: the file ends"),
        ("long strings", header(3, 0, 1, &array(8)), "key: the file ends"),
        ("nested", header(3, 0, 1, &array(9)), "key: is an array of the unsupported type 9"),
        ("odd type", header(3, 0, 1, &entry(77, &[])), "key: has the unknown type 77"),
        ("large number", header(3, 0, 1, &entry(10, &huge)), "key: is absurdly large"),
        ("many dimensions", header(3, 1, 0, &tensor(9, 1, 0, 0)), "weight: has 9 dimensions"),
        ("no dimension", header(3, 1, 0, &tensor(1, 0, 0, 0)), "weight: has a dimension of no sound size"),
        ("overflow", header(3, 1, 0, &tensor(4, 1 << 40, 0, 0)), "weight: has an absurd shape or offset"),
        (
            "odd format",
            header(3, 1, 0, &tensor(1, 32, 99, 0)),
            "weight: has the block format 99, of no name; those that",
        ),
        (
            "IQ4_XS",
            header(3, 1, 0, &tensor(1, 32, 23, 0)),
            "weight: has the block format IQ4_XS; those that are read are F32,",
        ),
        ("part of a block", header(3, 1, 0, &tensor(1, 33, 3, 0)), "weight: rows of 33 do not divide"),
        ("past the end", header(3, 1, 0, &tensor(1, 32, 0, 0)), "weight: ends at byte"),
        ("far away", header(3, 1, 0, &tensor(1, 32, 0, u64::MAX - 5)), "weight: has an absurd shape or offset"),
    ] {
        let message = open(&bytes).unwrap_err().to_string();
        assert!(message.contains(part), "{what}: {message}");
    }
}

#[test]
fn tensors_that_are_not_aligned_are_refused() {
    let mut entry = string("weight");
    entry.extend(1u32.to_le_bytes());
    entry.extend(1u64.to_le_bytes());
    entry.extend(0u32.to_le_bytes());
    entry.extend(2u64.to_le_bytes());
    entry.extend([0; 100]);
    let message = open(&header(3, 1, 0, &entry)).unwrap_err().to_string();
    assert!(message.contains("weight: is not aligned"), "{message}");
}

#[test]
fn what_stands_there_twice_or_lies_in_another_is_refused() {
    let entry = [&string("key")[..], &7u32.to_le_bytes(), &[1]].concat();
    let message = open(&header(3, 0, 2, &entry.repeat(2))).unwrap_err().to_string();
    assert!(message.contains("key: stands there twice"), "{message}");
    let tensor = |name: &str, offset: u64| {
        let numbers = [&1u32.to_le_bytes()[..], &16u64.to_le_bytes(), &0u32.to_le_bytes(), &offset.to_le_bytes()];
        [string(name), numbers.concat()].concat()
    };
    let with = |second: Vec<u8>| {
        let rest = [tensor("a", 0), second, vec![0; 200]].concat();
        open(&header(3, 2, 0, &rest)).map(drop).map_err(|e| e.to_string())
    };
    assert!(with(tensor("a", 64)).unwrap_err().contains("a: is listed twice"));
    assert!(with(tensor("b", 60)).unwrap_err().contains("b: begins at byte"));
    assert_eq!(with(tensor("b", 64)), Ok(()));
}

#[test]
fn values_are_read_as_what_they_are() {
    let entries = [
        [&string("u8")[..], &0u32.to_le_bytes(), &[200]].concat(),
        [&string("i8")[..], &1u32.to_le_bytes(), &[200]].concat(),
        [&string("i32")[..], &5u32.to_le_bytes(), &(-7i32).to_le_bytes()].concat(),
        [&string("f32")[..], &6u32.to_le_bytes(), &0.5f32.to_le_bytes()].concat(),
        [&string("bool")[..], &7u32.to_le_bytes(), &[1]].concat(),
        [&string("text")[..], &8u32.to_le_bytes(), &string("é")].concat(),
        [&string("list")[..], &9u32.to_le_bytes(), &6u32.to_le_bytes(), &1u64.to_le_bytes(), &2.5f32.to_le_bytes()]
            .concat(),
    ];
    let gguf = open(&header(3, 0, entries.len() as u64, &entries.concat())).unwrap();
    assert_eq!(gguf.optional_u64("u8").unwrap(), Some(200));
    assert_eq!(gguf.optional_f64("i8").unwrap(), Some(-56.0));
    assert_eq!(gguf.optional_f64("f32").unwrap(), Some(0.5));
    assert_eq!(gguf.optional_bool("bool").unwrap(), Some(true));
    assert_eq!(gguf.str("text").unwrap(), "é");
    assert_eq!(gguf.optional_floats("list").unwrap(), Some(vec![2.5]));
    assert_eq!(gguf.optional_u64("absent").unwrap(), None);
    for message in [
        gguf.optional_u64("i32").unwrap_err(),
        gguf.optional_u64("f32").unwrap_err(),
        gguf.optional_strings("list").unwrap_err(),
        gguf.optional_integers("list").unwrap_err(),
        gguf.str("absent").unwrap_err(),
    ] {
        assert!(message.to_string().contains(": "), "{message}");
    }
}
