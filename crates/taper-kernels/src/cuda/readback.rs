//! Numbers that launches leave for the host. What a thread's launches leave lies beside each other, so that the first that
//! is read brings all those so far: a step's layers wait for the device once. What was [sent](send) before comes without
//! what is queued behind it.

use super::coming::Coming;
use super::error::Result;
use super::op::Op;
use super::tape;
use candle_core::{DType, Shape, Tensor};
use std::cell::RefCell;
use std::collections::VecDeque;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

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
    read: Mutex<Read>,
}

/// How far a page has been read.
#[derive(Debug, Default)]
struct Read {
    /// Its words so far, from the first on.
    words: Vec<u32>,
    /// Those behind them that are on their way.
    coming: VecDeque<Coming>,
    /// How many those two are.
    sent: usize,
}

impl Read {
    /// Forgets what is on its way.
    fn again(&mut self) {
        self.coming.clear();
        self.sent = self.words.len();
    }
}

impl Page {
    fn read(&self) -> MutexGuard<'_, Read> {
        self.read.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Queues the copy of what this thread's launches have left so far.
pub(crate) fn send() -> Result<()> {
    let Some(page) = CURRENT.with_borrow(Clone::clone) else { return Ok(()) };
    let (mut read, given) = (page.read(), page.given.load(Ordering::Relaxed));
    if read.sent < given {
        let coming = Coming::new(&page.words.narrow(0, read.sent, given - read.sent)?)?;
        read.coming.push_back(coming);
        read.sent = given;
    }
    Ok(())
}

/// Words for one launch, or launches one after the other that nothing reads between.
#[derive(Debug, Clone)]
pub(super) struct Readback {
    page: Arc<Page>,
    start: usize,
    words: usize,
    /// Where they are written before they come there, in a step that goes by a tape.
    before: Option<Tensor>,
}

impl Readback {
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
            let before = tape::told(op, room, (&page.words, start))?;
            Ok(Self { page, start, words, before })
        })
    }

    /// So many of them from one on, a multiple of four.
    pub fn part(&self, start: usize, words: usize) -> Result<Self> {
        let before = self.before.as_ref().map(|before| before.narrow(0, start, words)).transpose()?;
        Ok(Self { page: self.page.clone(), start: self.start + start, words, before })
    }

    /// They, as a tensor to be written.
    pub fn tensor(&self, shape: impl Into<Shape>) -> Result<Tensor> {
        let words = match &self.before {
            Some(before) => before.narrow(0, 0, self.words)?,
            None => self.page.words.narrow(0, self.start, self.words)?,
        };
        Ok(words.reshape(shape.into())?)
    }

    /// What they have become. Waits for the device, unless this or a later one of the page has been read before; for what
    /// was sent no longer than until it is there.
    pub fn read(&self) -> Result<Vec<u32>> {
        let mut read = self.page.read();
        let end = self.start + self.words;
        while read.words.len() < end {
            let more = match read.coming.pop_front() {
                Some(coming) => coming.wait().inspect_err(|_| read.again())?,
                None => {
                    let (known, given) = (read.words.len(), self.page.given.load(Ordering::Relaxed));
                    let op = Op::new("told", "words", &self.page.words)?;
                    op.read("words", &self.page.words.narrow(0, known, given - known)?)?
                }
            };
            read.words.extend(more);
        }
        read.sent = read.sent.max(read.words.len());
        Ok(read.words[self.start..end].to_vec())
    }
}
