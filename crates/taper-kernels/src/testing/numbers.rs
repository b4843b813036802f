//! Random numbers of tests, those of a device too: tests/cuda takes this file as well.

/// A repeatable stream of numbers: splitmix64.
pub struct Numbers(pub u64);

impl Numbers {
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    /// Standard normal.
    pub fn normal(&mut self) -> f32 {
        let uniform = |x: u64| ((x >> 11) as f64 + 0.5) / (1u64 << 53) as f64;
        let (a, b) = (uniform(self.next()), uniform(self.next()));
        ((-2.0 * a.ln()).sqrt() * (std::f64::consts::TAU * b).cos()) as f32
    }
}
