//! Changes of a good file that know nothing of its format.

use proptest::prelude::*;
use proptest::sample::Index;

/// One change; places are shares of the file, or of its first part.
#[derive(Debug, Clone)]
pub enum Change {
    Flip(Index, u8),
    /// A little-endian number in four bytes.
    Word(Index, u32),
    /// One in eight.
    Long(Index, u64),
    /// The number that stands there, or one near it, in eight bytes.
    Near(Index, i64),
    Cut(Index),
    /// Bytes from one place written over another, or put in there.
    Splice {
        from: Index,
        to: Index,
        length: usize,
        over: bool,
    },
    /// What follows a place is other bytes.
    Tail(Index, Vec<u8>),
}

/// Numbers at which arithmetic goes wrong.
pub fn edge() -> impl Strategy<Value = u64> {
    let near = prop::sample::select(vec![0u64, 1 << 31, 1 << 32, 1 << 62, 1 << 63, u64::MAX, i64::MAX as u64]);
    prop_oneof![(near, -2i64..3).prop_map(|(n, by)| n.wrapping_add_signed(by)), 0u64..70, any::<u64>()]
}

pub fn change() -> impl Strategy<Value = Change> {
    let place = any::<Index>;
    prop_oneof![
        4 => (place(), 1u8..).prop_map(|(at, by)| Change::Flip(at, by)),
        4 => (place(), edge()).prop_map(|(at, n)| Change::Word(at, n as u32)),
        4 => (place(), edge()).prop_map(|(at, n)| Change::Long(at, n)),
        3 => (place(), -2i64..3).prop_map(|(at, by)| Change::Near(at, by)),
        1 => place().prop_map(Change::Cut),
        2 => (place(), place(), 1usize..64, any::<bool>())
            .prop_map(|(from, to, length, over)| Change::Splice { from, to, length, over }),
        1 => (place(), prop::collection::vec(any::<u8>(), 0..400)).prop_map(|(at, tail)| Change::Tail(at, tail)),
    ]
}

/// Makes a change somewhere in the first `part` bytes, where a header is.
pub fn apply(bytes: &mut Vec<u8>, part: usize, change: &Change) {
    let part = part.min(bytes.len());
    if part < 8 {
        return;
    }
    let put = |bytes: &mut Vec<u8>, at: usize, new: &[u8]| {
        let end = (at + new.len()).min(bytes.len());
        bytes[at..end].copy_from_slice(&new[..end - at]);
    };
    match change {
        Change::Flip(at, by) => bytes[at.index(part)] ^= by,
        Change::Word(at, n) => put(bytes, at.index(part), &n.to_le_bytes()),
        Change::Long(at, n) => put(bytes, at.index(part), &n.to_le_bytes()),
        Change::Near(at, by) => {
            let at = at.index(part - 7);
            let there = u64::from_le_bytes(bytes[at..at + 8].try_into().unwrap());
            put(bytes, at, &there.wrapping_add_signed(*by).to_le_bytes());
        }
        Change::Cut(at) => bytes.truncate(at.index(part)),
        Change::Splice { from, to, length, over } => {
            let from = from.index(part);
            let piece = bytes[from..(from + length).min(part)].to_vec();
            if *over {
                put(bytes, to.index(part), &piece);
            } else {
                let to = to.index(part);
                bytes.splice(to..to, piece);
            }
        }
        Change::Tail(at, tail) => {
            bytes.truncate(at.index(part));
            bytes.extend(tail);
        }
    }
}
