//! What the operations of a step queue, written down, so that a later step that comes to the same is queued by a few calls.
//!
//! While a thread [records](record) a tape, its operations do what they always do, and the tape keeps the memory that they
//! make, the host data that they upload, and their launches. While it [follows](follow) one, they get the same memory again and
//! launch nothing: each launch is compared with the one written down, address by address and number by number, and those that
//! are equal are queued some at a time, as CUDA graphs. What differs from step to step is what is uploaded, to
//! addresses that stay. Whatever else differs, a number or the order, ends it: the launches so far are queued one by one, and the
//! rest of the step goes its usual way. So nothing is queued that the step's own operations did not ask for.
//!
//! All of this holds for this library's operations alone. What goes to the device by another way meanwhile, such as an
//! operation of candle's, is queued before launches that are only compared yet: it may fill memory of its own, but what reads
//! what these write says so first ([`apart`]).

use super::error::{Error, Result};
use super::op::{Op, rooms};
use super::words::Words;
use crate::lent::Lent;
use candle_core::cuda_backend::cudarc::driver::{CudaGraph, CudaStream, sys};
use candle_core::{DType, Shape, Tensor};
use std::any::Any;
use std::cell::RefCell;
use std::ffi::c_void;
use std::sync::{Arc, Weak};

/// An entry point of the interface.
pub(super) type Entry<P> = unsafe extern "C" fn(*const P, *mut c_void) -> i32;

/// Launches of a step's first graph, for which the device waits until the host has compared them all; each has twice as
/// many as the one before, and so many at most: to queue one takes the host as long as to compare some of them.
const LAUNCHES: (usize, usize) = (8, 64);
/// Most bytes that a step makes, and words that it leaves for the host: where there are more, the host is not what limits.
const MADE_BYTES_MAX: usize = 256 << 20;
const TOLD_WORDS: usize = 1 << 18;

thread_local! {
    static TAPE: RefCell<Option<Tape>> = const { RefCell::new(None) };
}

/// A step's operations, as far as the device is concerned.
pub(super) struct Tape {
    stream: Arc<CudaStream>,
    state: State,
    calls: Vec<Call>,
    inputs: Vec<Input>,
    /// What goes from one tensor to another before its first launch: each of f32 in fours.
    copies: Vec<[Tensor; 2]>,
    /// Flat memory that one part of a step has after another, and who holds it.
    lent: Vec<(Tensor, Weak<()>)>,
    /// Words that launches leave for the host, `[TOLD_WORDS]`, and how many of them are given out.
    told: Option<(Tensor, usize)>,
    /// Where they are to go: what memory, from which word, and how many.
    leaves: Vec<(Tensor, usize, usize)>,
    /// Parts of the step: the call behind each, and its launches.
    graphs: Vec<(usize, CudaGraph)>,
    /// What launches use besides what they are given.
    rooms: Vec<Tensor>,
    /// Bytes of what its operations made.
    pub bytes: usize,
    /// The status of a launch that failed when it was queued later than its operation had been.
    failed: i32,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    Recording,
    /// Calls that were the same so far, and those of them whose launches are queued.
    Following {
        at: usize,
        queued: usize,
    },
    /// Too large to be kept, or no longer the same.
    Left,
}

enum Call {
    Made(Tensor),
    Lent(usize),
    Input(usize),
    Readback(usize, usize),
    Launch(Box<dyn Queue>),
}

/// A launch with all that it is given.
trait Queue {
    /// # Safety
    /// Its addresses must still be what they were when it was written down.
    unsafe fn queue(&self, stream: sys::CUstream) -> i32;

    fn as_any(&self) -> &dyn Any;
}

struct Launch<P> {
    entry: Entry<P>,
    p: P,
}

impl<P: 'static> Queue for Launch<P> {
    unsafe fn queue(&self, stream: sys::CUstream) -> i32 {
        // SAFETY: the caller's promise.
        unsafe { (self.entry)(&raw const self.p, stream.cast()) }
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}

/// Host data of a step, and its copy.
struct Input {
    bytes: Box<[u8]>,
    tensor: Tensor,
    address: u64,
    /// Whether this step has said what it is, and whether that is another than the copy.
    known: bool,
    changed: bool,
}

/// Has this thread's operations recorded from here to [`take`].
pub(super) fn record(op: &Op) {
    let tape = Tape {
        stream: op.cuda_stream().clone(),
        state: State::Recording,
        calls: Vec::new(),
        inputs: Vec::new(),
        copies: Vec::new(),
        lent: Vec::new(),
        told: None,
        leaves: Vec::new(),
        graphs: Vec::new(),
        rooms: Vec::new(),
        bytes: 0,
        failed: 0,
    };
    TAPE.set(Some(tape));
}

/// Has them go by a tape from here to [`take`]; `copies` go from one tensor to another before.
pub(super) fn follow(mut tape: Tape, copies: Vec<[Tensor; 2]>) {
    tape.copies = copies;
    tape.state = State::Following { at: 0, queued: 0 };
    tape.leaves.clear();
    for input in &mut tape.inputs {
        (input.known, input.changed) = (false, false);
    }
    TAPE.set(Some(tape));
}

/// The thread's tape, which it has no longer.
pub(super) fn take() -> Option<Tape> {
    TAPE.take()
}

/// Queues what was only compared so far, before the device's memory is touched by another way.
pub(super) fn leave() -> Result<()> {
    ended(|tape| {
        tape.leave();
        tape.failed
    })
}

/// The same; and what is being recorded is no tape, since it would not have what comes now.
pub(super) fn apart() -> Result<()> {
    ended(|tape| {
        tape.leave();
        tape.state = State::Left;
        tape.failed
    })
}

/// The same for a step that has failed: what its operations have done counts. The thread has no tape any more.
pub(super) fn give_up() {
    if let Some(mut tape) = take() {
        tape.leave();
    }
}

fn ended(by: impl FnOnce(&mut Tape) -> i32) -> Result<()> {
    match with(by) {
        None | Some(0) => Ok(()),
        Some(status) => Err(Error::Launch { op: "step", status }),
    }
}

/// A tensor of this shape and dtype: the tape's next, or a new one.
pub(super) fn made((shape, dtype): (&Shape, DType), make: impl FnOnce() -> Result<Tensor>) -> Result<Tensor> {
    let same = |call: &Call| match call {
        Call::Made(tensor) if tensor.shape() == shape && tensor.dtype() == dtype => Some(tensor.clone()),
        _ => None,
    };
    if let Some(tensor) = with(|tape| tape.next(same)).flatten() {
        return Ok(tensor);
    }
    let tensor = make()?;
    with(|tape| tape.hold(&tensor));
    Ok(tensor)
}

/// The same of what is needed for a short while only.
pub(super) fn lent((shape, dtype): (&Shape, DType), make: impl FnOnce() -> Result<Tensor>) -> Result<Lent> {
    let lend = |tensor: Tensor| tensor.reshape(shape).map(Lent::from);
    match with(|tape| tape.free((shape.elem_count(), dtype))) {
        None | Some(Free::No) => Ok(make()?.into()),
        Some(Free::Here(place, tensor)) => {
            let lent = lend(tensor)?;
            with(|tape| tape.lent[place].1 = lent.holders());
            Ok(lent)
        }
        Some(Free::New) => {
            let tensor = make()?.flatten_all()?;
            let lent = lend(tensor.clone())?;
            with(|tape| {
                if tape.counts(&tensor) {
                    tape.calls.push(Call::Lent(tape.lent.len()));
                    tape.lent.push((tensor, lent.holders()));
                }
            });
            Ok(lent)
        }
    }
}

enum Free {
    No,
    Here(usize, Tensor),
    New,
}

/// A tensor of host data that nothing writes to; none where there is no tape that has it. `upload` makes one.
pub(super) fn input(
    op: &Op,
    (dtype, bytes): (DType, &[u8]),
    upload: impl FnOnce() -> Result<Tensor>,
) -> Result<Option<Tensor>> {
    match with(|tape| tape.input(dtype, bytes)) {
        None | Some(Found::No) => Ok(None),
        Some(Found::Here(tensor)) => Ok(Some(tensor)),
        Some(Found::New) => {
            let tensor = upload()?;
            let address = op.at::<u8>("input", &tensor, dtype, tensor.dims())? as u64;
            let (known, changed) = (true, false);
            let input = Input { bytes: bytes.into(), tensor: tensor.clone(), address, known, changed };
            with(|tape| {
                tape.calls.push(Call::Input(tape.inputs.len()));
                tape.inputs.push(input);
            });
            Ok(Some(tensor))
        }
    }
}

enum Found {
    No,
    Here(Tensor),
    New,
}

/// So many words that go to `page`, `start` words from its beginning, once the step is queued; none where there is no tape
/// that has them.
pub(super) fn told(op: &Op, words: usize, (page, start): (&Tensor, usize)) -> Result<Option<Tensor>> {
    let recording = with(|tape| tape.state == State::Recording && tape.told.is_none());
    if recording == Some(true) {
        // SAFETY: any bits are words; launches write before anything reads.
        let room = unsafe { Tensor::empty(TOLD_WORDS, DType::U32, &op.device)? };
        with(|tape| tape.told = Some((room, 0)));
    }
    let from = with(|tape| tape.told(words)).flatten();
    from.map(|from| {
        with(|tape| tape.leaves.push((page.clone(), start, words)));
        let room = with(|tape| tape.told.as_ref().map(|(room, _)| room.narrow(0, from, words))).flatten();
        room.ok_or_else(|| op.error("told", "no room", "room for words"))?.map_err(Error::Candle)
    })
    .transpose()
}

/// A launch, or its comparison with the tape's next.
///
/// # Safety
/// As of the entry point.
pub(super) unsafe fn launch<P: Copy + PartialEq + 'static>(stream: sys::CUstream, entry: Entry<P>, p: &P) -> i32 {
    // SAFETY: the caller's promise.
    let live = || unsafe { entry(p, stream.cast()) };
    TAPE.with_borrow_mut(|tape| match tape {
        None => live(),
        Some(tape) => {
            let same = |call: &Call| match call {
                Call::Launch(of) => {
                    let of = of.as_any().downcast_ref::<Launch<P>>()?;
                    (of.entry as usize == entry as usize && of.p == *p).then_some(())
                }
                _ => None,
            };
            if tape.next(same).is_some() {
                return tape.queue_reached();
            }
            tape.leave();
            if tape.failed != 0 {
                return tape.failed;
            }
            let status = live();
            tape.note(|| Call::Launch(Box::new(Launch { entry, p: *p })));
            status
        }
    })
}

fn with<T>(f: impl FnOnce(&mut Tape) -> T) -> Option<T> {
    TAPE.with_borrow_mut(|tape| tape.as_mut().map(f))
}

impl Tape {
    /// Queues all of it as it is, for a step whose operations are not asked again.
    pub fn queue(&self, op: &Op) -> Result<()> {
        self.graphs.iter().try_for_each(|(_, graph)| {
            graph.launch().map_err(|failed| Error::Launch { op: op.name, status: failed.0 as i32 })
        })
    }

    /// What the next call has, if it is as expected; else the step's way is another from here on.
    fn next<T>(&mut self, same: impl FnOnce(&Call) -> Option<T>) -> Option<T> {
        let State::Following { at, queued } = self.state else { return None };
        let found = self.calls.get(at).and_then(same);
        if found.is_some() {
            self.state = State::Following { at: at + 1, queued };
        } else {
            self.leave();
        }
        found
    }

    /// Keeps what was made.
    fn hold(&mut self, tensor: &Tensor) {
        if self.state == State::Recording && self.counts(tensor) {
            self.calls.push(Call::Made(tensor.clone()));
        }
    }

    /// Counts what is about to be kept, unless a step makes too much: then nothing of it is kept.
    fn counts(&mut self, tensor: &Tensor) -> bool {
        self.bytes += tensor.elem_count() * tensor.dtype().size_in_bytes();
        let fits = self.bytes <= MADE_BYTES_MAX;
        if !fits {
            self.state = State::Left;
            self.calls.clear();
            self.inputs.clear();
            self.lent.clear();
        }
        fits
    }

    /// Memory for so many numbers that nobody holds.
    fn free(&mut self, (elements, dtype): (usize, DType)) -> Free {
        let fits = |(tensor, held): &(Tensor, Weak<()>)| {
            held.strong_count() == 0 && tensor.elem_count() == elements && tensor.dtype() == dtype
        };
        let place = match self.state {
            State::Left => None,
            State::Recording => match self.lent.iter().position(fits) {
                None => return Free::New,
                Some(place) => {
                    self.calls.push(Call::Lent(place));
                    Some(place)
                }
            },
            State::Following { at, queued } => match self.calls.get(at) {
                Some(&Call::Lent(place)) if fits(&self.lent[place]) => {
                    self.state = State::Following { at: at + 1, queued };
                    Some(place)
                }
                _ => {
                    self.leave();
                    None
                }
            },
        };
        place.map_or(Free::No, |place| Free::Here(place, self.lent[place].0.clone()))
    }

    fn note(&mut self, call: impl FnOnce() -> Call) {
        if self.state == State::Recording {
            self.calls.push(call());
        }
    }

    fn input(&mut self, dtype: DType, bytes: &[u8]) -> Found {
        match self.state {
            State::Left => Found::No,
            State::Recording => {
                let equal = |input: &Input| input.tensor.dtype() == dtype && *input.bytes == *bytes;
                let Some(place) = self.inputs.iter().position(equal) else { return Found::New };
                self.calls.push(Call::Input(place));
                Found::Here(self.inputs[place].tensor.clone())
            }
            State::Following { at, queued } => {
                let place = match self.calls.get(at) {
                    Some(&Call::Input(place)) => Some(place),
                    _ => None,
                };
                let fits = |input: &&mut Input| {
                    let fits = input.tensor.dtype() == dtype && input.bytes.len() == bytes.len();
                    fits && (!input.known || *input.bytes == *bytes)
                };
                let Some(input) = place.and_then(|place| self.inputs.get_mut(place)).filter(fits) else {
                    self.leave();
                    return Found::No;
                };
                if *input.bytes != *bytes {
                    input.bytes.copy_from_slice(bytes);
                    input.changed = true;
                }
                input.known = true;
                let tensor = input.tensor.clone();
                self.state = State::Following { at: at + 1, queued };
                Found::Here(tensor)
            }
        }
    }

    /// Where so many words begin.
    fn told(&mut self, words: usize) -> Option<usize> {
        match self.state {
            State::Left => None,
            State::Recording => {
                let (_, given) = self.told.as_mut()?;
                let from = *given;
                if from + words > TOLD_WORDS {
                    self.state = State::Left;
                    return None;
                }
                *given += words;
                self.calls.push(Call::Readback(from, words));
                Some(from)
            }
            State::Following { .. } => self.next(|call| match call {
                Call::Readback(from, count) if *count == words => Some(*from),
                _ => None,
            }),
        }
    }

    /// Queues the part of the step that ends here, if one does.
    fn queue_reached(&mut self) -> i32 {
        let State::Following { at, .. } = self.state else { return 0 };
        let Some(part) = self.graphs.iter().position(|(end, _)| *end == at) else { return 0 };
        let status = match self.write() {
            0 => self.graphs[part].1.launch().map_or_else(|failed| failed.0 as i32, |()| 0),
            failed => failed,
        };
        self.state = State::Following { at, queued: at };
        status
    }

    /// Has what the step begins with copied, and the inputs that are others than before.
    fn write(&mut self) -> i32 {
        let mut words = Words::new(self.stream.cu_stream());
        for [from, to] in self.copies.drain(..) {
            let copied = Op::new("step", "from", &from).and_then(|op| words.copy_tensor(&op, &from, &to));
            if copied.is_err() {
                return sys::CUresult::CUDA_ERROR_INVALID_VALUE as i32;
            }
        }
        for input in self.inputs.iter_mut().filter(|input| input.changed) {
            input.changed = false;
            // SAFETY: there are so many bytes at the address, which the step's launches read.
            unsafe { words.write(input.address, &input.bytes) };
        }
        words.queue()
    }

    /// Queues, one by one, the launches that were only compared, and follows no longer.
    fn leave(&mut self) {
        let State::Following { at, queued } = self.state else { return };
        self.state = State::Left;
        self.failed = self.write();
        for call in &self.calls[queued..at] {
            if let (0, Call::Launch(of)) = (self.failed, call) {
                // SAFETY: this step's operations have just asked for the same.
                self.failed = unsafe { of.queue(self.stream.cu_stream()) };
            }
        }
    }

    /// Once all of a step's operations have been: queues what is left, and has what they left for the host go where it is
    /// read. Itself, if a step can go by it.
    pub fn finish(mut self, op: &Op) -> Result<Option<Self>> {
        let launch = |call: &Call| matches!(call, Call::Launch(_));
        let mut kept = match self.state {
            State::Left => false,
            State::Recording => true,
            State::Following { at, queued } => at == self.calls.len() && !self.calls[queued..].iter().any(launch),
        };
        if !kept {
            self.leave();
        }
        if self.failed != 0 {
            return Err(Error::Launch { op: op.name, status: self.failed });
        }
        self.bring(op)?;
        if self.state == State::Recording {
            self.rooms = rooms();
            kept = self.capture().is_some();
        }
        Ok(kept.then_some(self))
    }

    /// Copies the words left for the host to where they are read.
    fn bring(&mut self, op: &Op) -> Result<()> {
        let Some((room, _)) = &self.told else { return Ok(()) };
        let from: *mut u32 = op.at("told", room, DType::U32, [TOLD_WORDS])?;
        let (mut begin, mut leaves) = (0, self.leaves.drain(..).peekable());
        let mut copied = Words::new(self.stream.cu_stream());
        while let Some((page, start, mut words)) = leaves.next() {
            while let Some((_, _, more)) = leaves.next_if(|next| next.0.id() == page.id() && next.1 == start + words) {
                words += more;
            }
            let to: *mut u32 = op.at("told", &page, DType::U32, page.dims())?;
            // SAFETY: the words, which begin and end on 16 bytes, lie within the room, and within the page.
            unsafe { copied.copy(from.wrapping_add(begin), to.wrapping_add(start), words) };
            begin += words;
        }
        copied.send(op)
    }

    /// Makes graphs of the launches; none if they cannot be captured.
    fn capture(&mut self) -> Option<()> {
        let launches: Vec<usize> =
            (0..self.calls.len()).filter(|&i| matches!(self.calls[i], Call::Launch(_))).collect();
        let (mut count, most) = LAUNCHES;
        let mut rest = &launches[..];
        while !rest.is_empty() {
            let (part, behind) = rest.split_at(count.min(rest.len()));
            (rest, count) = (behind, most.min(2 * count));
            self.stream.begin_capture(sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED).ok()?;
            let queue = |i: &usize| match &self.calls[*i] {
                // SAFETY: the tape holds what it made, and the caller's tensors are those of this step still.
                Call::Launch(of) => unsafe { of.queue(self.stream.cu_stream()) == 0 },
                _ => true,
            };
            let queued = part.iter().all(queue);
            let graph = self.stream.end_capture(sys::CUgraphInstantiate_flags(0)).ok().flatten()?;
            if !queued {
                return None;
            }
            self.graphs.push((part[part.len() - 1] + 1, graph));
        }
        (!self.graphs.is_empty()).then_some(())
    }
}
