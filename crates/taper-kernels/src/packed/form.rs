//! How weights lie in a panel, and how the blocks of a GGUF file are brought there.

use super::{BLOCK, ROWS};
use candle_core::quantized::GgmlDType;
use half::f16;

/// Blocks of 32 that a super-block of the K types has.
const SUPER: usize = 8;

/// How a panel's weights lie, a stretch of blocks behind the other. A stretch begins with what its blocks have in common, then come
/// the scales of each block, then the weights of each.
///
/// - A block alone: `d[16] m[16]` (f16), of eight bits `d[16]`; a weight is `d q + m`.
/// - A super-block: `d[16] m[16]` (f16), and for each block `s[16] t[16]` (bytes): `(d s) q + m t`. Of six bits `d[16]` and a
///   scale each for the block's halves: `(d s) (q - 32)`. Products of `d` and a scale are exact in f32, so weights are the file's.
///
/// Weight `k` of row `r` is at byte `4 r + k % 4` of vector `k / 4`. Vectors have 64 bytes. Of two vectors `j` and `j + 4` low
/// halves of bytes share one: `j` has its low half. Bits beyond four follow: `HIGH` of them are at bit `HIGH j % 8` of vector `HIGH j / 8`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Form {
    /// Of a weight: 4, 5, 6 or 8.
    pub bits: usize,
    /// Blocks of a stretch: one, or those of a super-block.
    pub blocks: usize,
}

impl Form {
    pub const FOUR: Self = Self { bits: 4, blocks: 1 };
    pub const FIVE: Self = Self { bits: 5, blocks: 1 };
    pub const EIGHT: Self = Self { bits: 8, blocks: 1 };
    pub const FOUR_K: Self = Self { bits: 4, blocks: SUPER };
    pub const FIVE_K: Self = Self { bits: 5, blocks: SUPER };
    pub const SIX_K: Self = Self { bits: 6, blocks: SUPER };

    /// The form of a GGUF type, if it has one.
    pub fn of(dtype: GgmlDType) -> Option<Self> {
        match dtype {
            GgmlDType::Q4_0 | GgmlDType::Q4_1 => Some(Self::FOUR),
            GgmlDType::Q5_0 | GgmlDType::Q5_1 => Some(Self::FIVE),
            GgmlDType::Q8_0 => Some(Self::EIGHT),
            GgmlDType::Q4K => Some(Self::FOUR_K),
            GgmlDType::Q5K => Some(Self::FIVE_K),
            GgmlDType::Q6K => Some(Self::SIX_K),
            _ => None,
        }
    }

    /// Whether a block's two scales are its halves', and not a scale and an offset.
    pub const fn by_halves(self) -> bool {
        self.bits == 6
    }

    /// Bytes at the beginning of a stretch.
    const fn common(self) -> usize {
        match (self.blocks, self.by_halves()) {
            (1, _) => 0,
            (_, true) => 2 * ROWS,
            (_, false) => 4 * ROWS,
        }
    }

    /// Bytes of a block's scales.
    const fn scales(self) -> usize {
        if self.blocks == 1 && self.bits < 8 { 4 * ROWS } else { 2 * ROWS }
    }

    /// Where a block of a stretch has its scales.
    pub const fn scales_at(self, block: usize) -> usize {
        self.common() + block * self.scales()
    }

    /// Where it has its weights.
    pub const fn weights_at(self, block: usize) -> usize {
        self.scales_at(self.blocks) + block * ROWS * BLOCK * self.bits / 8
    }

    /// Bytes of a stretch.
    pub const fn size(self) -> usize {
        self.weights_at(self.blocks)
    }

    /// Puts a row's stretch in its place, which is zeros.
    pub fn pack(self, dtype: GgmlDType, row: usize, source: &[u8], to: &mut [u8]) {
        let source = Source { dtype, bytes: source };
        let mut half = |at: usize, value: f16| to[at + 2 * row..][..2].copy_from_slice(&value.to_le_bytes());
        let (d, m) = source.halves();
        half(0, d);
        if let Some(m) = m {
            half(2 * ROWS, m);
        }
        for block in 0..self.blocks {
            if self.blocks > 1 {
                let scales = source.scales(block);
                let at = self.scales_at(block) + row;
                (to[at], to[at + ROWS]) = (scales[0], scales[1]);
            }
            let mut vector = |j: usize, four: u32| {
                to[self.weights_at(block) + 4 * (j * ROWS + row)..][..4].copy_from_slice(&four.to_le_bytes());
            };
            // Four weights are one number: bits go where they belong at once.
            let q = source.weights(block);
            let q: [u32; 8] =
                std::array::from_fn(|j| u32::from_le_bytes([q[4 * j], q[4 * j + 1], q[4 * j + 2], q[4 * j + 3]]));
            if self.bits == 8 {
                (0..8).for_each(|j| vector(j, q[j]));
                continue;
            }
            (0..4).for_each(|j| vector(j, q[j] & LOW | (q[j + 4] & LOW) << 4));
            let high = self.bits - 4;
            for i in 0..high {
                let beyond = (8 / high * i..8 / high * (i + 1)).map(|j| (q[j] >> 4 & LOW) << (high * j % 8));
                vector(4 + i, beyond.fold(0, |all, some| all | some));
            }
        }
    }

    /// A block of a stretch as 16 rows' two scales, or scale and offset, and weights as they lie.
    pub fn unpack(self, stretch: &[u8], block: usize) -> ([[f32; 2]; ROWS], [[i8; 4 * ROWS]; 8]) {
        let half = |at: usize| f16::from_le_bytes([stretch[at], stretch[at + 1]]).to_f32();
        let scales = std::array::from_fn(|row| {
            let own = self.scales_at(block) + row;
            match (self.blocks, self.bits) {
                (1, 8) => [half(2 * row), 0.0],
                (1, _) => [half(2 * row), half(2 * (ROWS + row))],
                (_, 6) => [own, own + ROWS].map(|at| half(2 * row) * f32::from(stretch[at] as i8)),
                _ => [(row, own), (ROWS + row, own + ROWS)].map(|(d, at)| half(2 * d) * f32::from(stretch[at])),
            }
        });
        let vector = |j: usize| &stretch[self.weights_at(block) + 4 * j * ROWS..][..4 * ROWS];
        let (high, centre) = (self.bits - 4, if self.by_halves() { 32 } else { 0 });
        let mut weights = [[0i8; 4 * ROWS]; 8];
        for (j, weights) in weights.iter_mut().enumerate() {
            if self.bits == 8 {
                weights.iter_mut().zip(vector(j)).for_each(|(q, byte)| *q = *byte as i8);
                continue;
            }
            let shift = 4 * (j / 4);
            weights.iter_mut().zip(vector(j % 4)).for_each(|(q, byte)| *q = (byte >> shift & 15) as i8 - centre);
            if high > 0 {
                let (mask, bit) = ((1 << high) - 1, high * j % 8);
                let beyond = vector(4 + high * j / 8);
                weights.iter_mut().zip(beyond).for_each(|(q, byte)| *q += ((byte >> bit & mask) << 4) as i8);
            }
        }
        (scales, weights)
    }
}

/// The low halves of four bytes.
const LOW: u32 = 0x0f0f_0f0f;

/// A row's block of a GGUF file, a super-block of the K types. Bytes are in the file's order.
struct Source<'a> {
    dtype: GgmlDType,
    bytes: &'a [u8],
}

impl Source<'_> {
    fn half(&self, at: usize) -> f16 {
        f16::from_le_bytes([self.bytes[at], self.bytes[at + 1]])
    }

    /// What the panel has of the whole: `d`, and `m` where there is one. Offsets of the K types are taken off.
    fn halves(&self) -> (f16, Option<f16>) {
        let centred = |by: f32| (self.half(0), Some(f16::from_f32(-by * self.half(0).to_f32())));
        match self.dtype {
            GgmlDType::Q4_0 => centred(8.0),
            GgmlDType::Q5_0 => centred(16.0),
            GgmlDType::Q4_1 | GgmlDType::Q5_1 => (self.half(0), Some(self.half(2))),
            GgmlDType::Q4K | GgmlDType::Q5K => (self.half(0), Some(-self.half(2))),
            GgmlDType::Q6K => (self.half(208), None),
            _ => (self.half(0), None),
        }
    }

    /// A block's scale and offset in units of the super-block's, of six bits its halves' scales.
    fn scales(&self, block: usize) -> [u8; 2] {
        if self.dtype == GgmlDType::Q6K {
            return [self.bytes[192 + 2 * block], self.bytes[193 + 2 * block]];
        }
        // Six bits each: four scales and four offsets whole in a byte, whose two other bits are the upper ones of four more, whose lower
        // four share a byte, scale and offset.
        let at = &self.bytes[4..16];
        match block {
            0..4 => [at[block] & 63, at[block + 4] & 63],
            _ => [at[block + 4] & 15 | at[block - 4] >> 6 << 4, at[block + 4] >> 4 | at[block] >> 6 << 4],
        }
    }

    /// A block's weights as they are before they are scaled.
    fn weights(&self, block: usize) -> [u8; BLOCK] {
        let half = |byte: u8, upper: bool| if upper { byte >> 4 } else { byte & 15 };
        let odd = block % 2 == 1;
        match self.dtype {
            // Sixteen bytes: a weight and the sixteenth after it.
            GgmlDType::Q4_0 | GgmlDType::Q4_1 | GgmlDType::Q5_0 | GgmlDType::Q5_1 => {
                let nibbles = &self.bytes[self.bytes.len() - BLOCK / 2..];
                let fifth = match self.dtype {
                    GgmlDType::Q5_0 | GgmlDType::Q5_1 => self.bytes[..self.bytes.len() - BLOCK / 2].last_chunk(),
                    _ => None,
                };
                let fifth = fifth.map_or(0, |fifth| u32::from_le_bytes(*fifth));
                std::array::from_fn(|k| half(nibbles[k % 16], k >= 16) | ((fifth >> k & 1) as u8 * 16))
            }
            // Of two blocks one has the low halves of 32 bytes.
            GgmlDType::Q4K => {
                let nibbles = &self.bytes[16 + block / 2 * BLOCK..][..BLOCK];
                std::array::from_fn(|k| half(nibbles[k], odd))
            }
            // As well; bit `block` of 32 others is the fifth.
            GgmlDType::Q5K => {
                let (fifth, nibbles) = (&self.bytes[16..48], &self.bytes[48 + block / 2 * BLOCK..][..BLOCK]);
                std::array::from_fn(|k| half(nibbles[k], odd) | ((fifth[k] >> block & 1) * 16))
            }
            // Four blocks share 64 bytes of low bits, the third and the fourth in the upper halves, and 32 of two bits each.
            GgmlDType::Q6K => {
                let (group, block) = (block / 4, block % 4);
                let low = &self.bytes[64 * group + 32 * usize::from(odd)..][..BLOCK];
                let high = &self.bytes[128 + 32 * group..][..BLOCK];
                std::array::from_fn(|k| half(low[k], block >= 2) | (high[k] >> (2 * block) & 3) << 4)
            }
            _ => std::array::from_fn(|k| self.bytes[2 + k]),
        }
    }
}
