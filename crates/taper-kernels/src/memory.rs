//! Memory for what is large and read at random places.

/// Zeros that the system hands out untouched, on pages of 2 MiB where it has them: a key at a random place otherwise costs a
/// walk through the page tables besides.
pub(crate) fn zeros<T: bytemuck::Zeroable>(len: usize) -> Vec<T> {
    let zeros = bytemuck::zeroed_vec::<T>(len);
    prefer_large_pages(&zeros);
    zeros
}

/// Linux alone is asked. That it may not oblige is no error.
#[cfg(target_os = "linux")]
fn prefer_large_pages<T>(memory: &[T]) {
    let bytes = memory.as_ptr_range();
    let (start, end) =
        ((bytes.start as usize).next_multiple_of(LARGE_PAGE), bytes.end as usize / LARGE_PAGE * LARGE_PAGE);
    if start < end {
        // SAFETY: whole pages within the slice, whose content the advice does not change.
        unsafe { libc::madvise(start as *mut libc::c_void, end - start, libc::MADV_HUGEPAGE) };
    }
}

/// Bytes of a large page.
#[cfg(target_os = "linux")]
const LARGE_PAGE: usize = 2 << 20;

#[cfg(not(target_os = "linux"))]
fn prefer_large_pages<T>(_: &[T]) {}

#[cfg(test)]
mod tests {
    #[test]
    fn zeros_of_any_length_are_zero() {
        for len in [0, 1, 1000, (5 << 20) + 3] {
            let zeros = super::zeros::<u16>(len);
            assert!(zeros.len() == len && zeros.iter().all(|x| *x == 0));
        }
    }
}
