//! Numbers that launches leave for the host. What a thread's launches leave lies beside each other, so that the first that
//! is read brings all those so far: a step's layers wait for the device once.

use super::error::Result;
use super::op::Op;
use candle_core::{DType, Shape, Tensor};
use std::cell::RefCell;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

/// Words of a page at least: those of some fifty steps of a large model.
const PAGE_WORDS: usize = 1 << 18;

thread_local! {
    /// The page that the next launches write to.
    static CURRENT: RefCell<Option<Arc<Page>>> = RefCell::default();
}

/// Memory for the words of many launches, one after the other.
#[derive(Debug)]
struct Page {
    /// `[words]`, u32.
    words: Tensor,
    /// How many have been given out.
    given: AtomicUsize,
    /// Those that have been read, from the first on.
    read: Mutex<Vec<u32>>,
}

/// Words for one launch, or launches one after the other that nothing reads between.
#[derive(Debug, Clone)]
pub(super) struct Told {
    page: Arc<Page>,
    start: usize,
    words: usize,
}

impl Told {
    /// So many words, u32, which begin on 16 bytes. The caller's next launches write them.
    pub fn new(op: &Op, words: usize) -> Result<Self> {
        CURRENT.with_borrow_mut(|current| {
            let room = words.next_multiple_of(4);
            let fits = |page: &&Arc<Page>| {
                let left = page.words.elem_count() - page.given.load(Ordering::Relaxed);
                left >= room && page.words.device().same_device(&op.device)
            };
            let page = match current.as_ref().filter(fits) {
                Some(page) => page.clone(),
                None => {
                    let words = op.zeros(room.max(PAGE_WORDS), DType::U32)?;
                    current.insert(Arc::new(Page { words, given: AtomicUsize::new(0), read: Mutex::default() })).clone()
                }
            };
            let start = page.given.fetch_add(room, Ordering::Relaxed);
            Ok(Self { page, start, words })
        })
    }

    /// They, as a tensor to be written.
    pub fn tensor(&self, shape: impl Into<Shape>) -> Result<Tensor> {
        Ok(self.page.words.narrow(0, self.start, self.words)?.reshape(shape.into())?)
    }

    /// What they have become. Waits for the device, unless this or a later one of the page has been read before.
    pub fn read(&self) -> Result<Vec<u32>> {
        let mut read = self.page.read.lock().unwrap_or_else(PoisonError::into_inner);
        let (known, end) = (read.len(), self.start + self.words);
        if known < end {
            let given = self.page.given.load(Ordering::Relaxed);
            let op = Op::new("told", "words", &self.page.words)?;
            let new = op.read("words", &self.page.words.narrow(0, known, given - known)?)?;
            read.extend(new);
        }
        Ok(read[self.start..end].to_vec())
    }
}
