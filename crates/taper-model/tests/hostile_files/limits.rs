//! What reading a file may cost: memory, by an allocator that counts, and time.

use std::alloc::{GlobalAlloc, Layout, System};
use std::backtrace::Backtrace;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::sync::{Mutex, Once, PoisonError, mpsc};
use std::time::Duration;

/// Longer than anything here takes on a busy machine by two orders.
const TIME_MAX: Duration = Duration::from_secs(20);

/// A request above this is turned down, which ends the process: the machine is not to be filled by a test.
const REQUEST_MAX: usize = 4 << 30;

/// Beside what a file's size allows: the runtime, worker threads, compiled patterns of tokenizers.
const ANYWAY: usize = 48 << 20;

struct Counting;

#[global_allocator]
static COUNTING: Counting = Counting;

static NOW: AtomicUsize = AtomicUsize::new(0);
static PEAK: AtomicUsize = AtomicUsize::new(0);

fn grow(bytes: usize) {
    PEAK.fetch_max(NOW.fetch_add(bytes, Relaxed) + bytes, Relaxed);
}

// SAFETY: the system's allocator does the work; what is added is counting.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        if layout.size() > REQUEST_MAX {
            return std::ptr::null_mut();
        }
        grow(layout.size());
        // SAFETY: the caller's promise is the system's.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        if layout.size() > REQUEST_MAX {
            return std::ptr::null_mut();
        }
        grow(layout.size());
        // SAFETY: as above.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn realloc(&self, pointer: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        if size > REQUEST_MAX {
            return std::ptr::null_mut();
        }
        NOW.fetch_sub(layout.size(), Relaxed);
        grow(size);
        // SAFETY: as above.
        unsafe { System.realloc(pointer, layout, size) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        NOW.fetch_sub(layout.size(), Relaxed);
        // SAFETY: as above.
        unsafe { System.dealloc(pointer, layout) }
    }
}

/// Runs on a thread as small as a server's, and fails on a panic, on more than `bytes` beyond what anything takes, and on
/// an end that does not come.
pub fn within<T: Send + 'static>(bytes: usize, run: impl FnOnce() -> T + Send + 'static) -> T {
    static ALONE: Mutex<()> = Mutex::new(());
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    // Where errors say where they are from, the first reads the program's debugging information.
    static SYMBOLS: Once = Once::new();
    SYMBOLS.call_once(|| drop(Backtrace::capture().to_string()));
    let before = NOW.load(Relaxed);
    PEAK.store(before, Relaxed);
    let (sender, ended) = mpsc::channel();
    let work = move || {
        let _ = sender.send(catch_unwind(AssertUnwindSafe(run)));
    };
    let thread = std::thread::Builder::new().stack_size(2 << 20).spawn(work).unwrap();
    let out = match ended.recv_timeout(TIME_MAX) {
        Ok(Ok(out)) => out,
        Ok(Err(panic)) => resume_unwind(panic),
        Err(_) => panic!("does not end within {TIME_MAX:?}"),
    };
    thread.join().unwrap();
    let took = PEAK.load(Relaxed).saturating_sub(before);
    assert!(took <= ANYWAY + bytes, "takes {took} bytes, {bytes} are allowed beside {ANYWAY}");
    out
}
