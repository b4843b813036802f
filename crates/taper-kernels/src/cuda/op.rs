//! What every operation does before it launches: find the device's stream, check tensors, take their addresses.

use super::error::{Error, Result};
use super::ffi;
use super::tape::{self, Entry};
use crate::CUDA_HEAD_DIMS;
use crate::lent::Lent;
use candle_core::cuda_backend::CudaDType;
use candle_core::cuda_backend::cudarc::driver::{CudaStream, DevicePtr, result as driver, sys};
use candle_core::{CudaStorage, DType, Device, Storage, Tensor, WithDType};
use half::{bf16, f16};
use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::ffi::c_void;
use std::fmt::Display;
use std::sync::Arc;

/// Host data whose copies are looked for first, in bytes at most, and how many copies a thread keeps.
const KEPT_BYTES: usize = 256 * 1024;
const KEPT_COPIES: usize = 512;

/// What host data is found by: type, bytes, a hash of some of them.
type Content = (DType, usize, u64);

/// Host data, and its copy.
type Copied = (Box<[u8]>, Tensor);

thread_local! {
    /// Copies of tables, lengths and lists on the device. All layers of a step upload the same: the first one does.
    static KEPT: RefCell<HashMap<Content, Copied>> = RefCell::default();
    /// Room for what launches work with, by its use.
    static ROOM: RefCell<HashMap<&'static str, Tensor>> = RefCell::default();
    /// What [`fresh`] goes by.
    static RENEWED: Cell<Option<usize>> = const { Cell::new(None) };
}

/// Of how many last tokens of a row of `len`, and of shorter ones, this thread's latest launch may be renewing what an index
/// has; 0 where it was another launch. What goes before that launch has ended by the time that it lets another begin.
pub(super) fn fresh(len: usize) -> i32 {
    RENEWED.get().map_or(0, |first| i32::try_from(len.saturating_sub(first)).unwrap_or(i32::MAX))
}

/// Whether this thread's latest launch does nothing but renew what an index has; see [`fresh`].
pub(super) fn renewing() -> bool {
    RENEWED.get().is_some()
}

/// Says of the launch before that it renews what an index has of tokens from position `first` on; see [`fresh`].
pub(super) fn renews(first: usize) {
    RENEWED.set(Some(first));
}

/// All room of this thread.
pub(super) fn rooms() -> Vec<Tensor> {
    ROOM.with_borrow(|rooms| rooms.values().cloned().collect())
}

/// One call of one operation.
///
/// Addresses are taken while the caller holds the tensors, and candle frees their memory in the order of the stream that
/// the launch goes to; so a launch never outlives what it reads.
pub(super) struct Op {
    pub name: &'static str,
    pub device: Device,
    stream: Arc<CudaStream>,
}

impl Op {
    /// On the device of a tensor.
    pub fn new(name: &'static str, parameter: &'static str, tensor: &Tensor) -> Result<Self> {
        Self::on(name, parameter, tensor.device())
    }

    /// On a device.
    pub fn on(name: &'static str, parameter: &'static str, device: &Device) -> Result<Self> {
        let Device::Cuda(cuda) = device else {
            return Err(Error::parameter(name, parameter, "not on a CUDA device", "a CUDA tensor"));
        };
        let stream = cuda.cuda_stream();
        // The CUDA runtime, which the kernels launch through, works in the thread's current context.
        stream.context().bind_to_thread().map_err(candle_core::Error::wrap)?;
        Ok(Self { name, device: device.clone(), stream })
    }

    pub fn cuda_stream(&self) -> &Arc<CudaStream> {
        &self.stream
    }

    pub fn error(&self, parameter: &'static str, got: impl Display, expected: impl Display) -> Error {
        Error::parameter(self.name, parameter, got, expected)
    }

    /// Fails unless a condition on a parameter holds.
    pub fn check(&self, holds: bool, parameter: &'static str, got: impl Display, expected: impl Display) -> Result<()> {
        if holds { Ok(()) } else { Err(self.error(parameter, got, expected)) }
    }

    /// Fails unless there are kernels for heads of this size.
    pub fn head_dim(&self, parameter: &'static str, head_dim: usize) -> Result<()> {
        let has = CUDA_HEAD_DIMS.contains(&head_dim);
        self.check(has, parameter, format_args!("head_dim {head_dim}"), "64 or 128")
    }

    /// The address of a tensor of this dtype and shape, contiguous and on 16 bytes.
    pub fn at<T>(
        &self,
        parameter: &'static str,
        tensor: &Tensor,
        dtype: DType,
        shape: impl AsRef<[usize]>,
    ) -> Result<*mut T> {
        let shape = shape.as_ref();
        if tensor.dtype() != dtype || tensor.dims() != shape {
            let got = format!("{:?} {:?}", tensor.dtype(), tensor.dims());
            return Err(self.error(parameter, got, format!("{dtype:?} {shape:?}")));
        }
        let (storage, layout) = tensor.storage_and_layout();
        let Storage::Cuda(storage) = &*storage else {
            return Err(self.error(parameter, "not on the device", "a tensor of the other's device"));
        };
        self.check(tensor.device().same_device(&self.device), parameter, "of another device", "the other's device")?;
        let Some((start, _)) = layout.contiguous_offsets() else {
            return Err(self.error(parameter, format!("strided {:?}", layout.stride()), "a contiguous tensor"));
        };
        let base = match dtype {
            DType::BF16 => self.base::<bf16>(storage),
            DType::F16 => self.base::<f16>(storage),
            DType::F32 => self.base::<f32>(storage),
            DType::U32 => self.base::<u32>(storage),
            DType::I16 => self.base::<i16>(storage),
            DType::I64 => self.base::<i64>(storage),
            other => return Err(self.error(parameter, format!("{other:?}"), "bf16, f16, f32, u32, i16 or i64")),
        }?;
        let address = base + (start * dtype.size_in_bytes()) as u64;
        self.check(
            address.is_multiple_of(16),
            parameter,
            "a view between 16 bytes",
            "a tensor that begins on 16 bytes",
        )?;
        Ok(address as *mut T)
    }

    fn base<T: CudaDType>(&self, storage: &CudaStorage) -> Result<u64> {
        Ok(storage.as_cuda_slice::<T>()?.device_ptr(&self.stream).0)
    }

    /// [`Op::at`], or null.
    pub fn maybe<T>(
        &self,
        parameter: &'static str,
        tensor: Option<&Tensor>,
        dtype: DType,
        shape: impl AsRef<[usize]>,
    ) -> Result<*mut T> {
        tensor.map_or(Ok(std::ptr::null_mut()), |tensor| self.at(parameter, tensor, dtype, shape))
    }

    /// The address of ids that lists slice, u32 of any shape, or null.
    pub fn pool(&self, parameter: &'static str, ids: Option<&Tensor>) -> Result<*const u32> {
        ids.map_or(Ok(std::ptr::null()), |ids| Ok(self.at::<u32>(parameter, ids, DType::U32, ids.dims())?.cast_const()))
    }

    /// A tensor to be written by the launch.
    pub fn empty(&self, shape: impl Into<candle_core::Shape>, dtype: DType) -> Result<Tensor> {
        let shape = shape.into();
        let shape = if shape.elem_count() == 0 { (1,).into() } else { shape };
        // SAFETY: any bits are a number of these types; the launch writes them before anything reads.
        tape::made((&shape, dtype), || Ok(unsafe { Tensor::empty(shape.clone(), dtype, &self.device)? }))
    }

    /// The same for a short while.
    pub fn lent(&self, shape: impl Into<candle_core::Shape>, dtype: DType) -> Result<Lent> {
        let shape = shape.into();
        let shape = if shape.elem_count() == 0 { (1,).into() } else { shape };
        // SAFETY: as in `empty`.
        tape::lent((&shape, dtype), || Ok(unsafe { Tensor::empty(shape.clone(), dtype, &self.device)? }))
    }

    /// The address of room for so many numbers, which the thread keeps for its next launch of this use: for what nobody
    /// reads after that launch has begun.
    pub fn room<T>(&self, of: &'static str, elements: usize, dtype: DType) -> Result<*mut T> {
        let fits =
            |t: &&Tensor| t.elem_count() >= elements && t.dtype() == dtype && t.device().same_device(&self.device);
        let tensor = match ROOM.with_borrow(|rooms| rooms.get(of).filter(fits).cloned()) {
            Some(known) => known,
            None => {
                // SAFETY: any bits are a number of these types; launches write before they read.
                let made = unsafe { Tensor::empty(elements.max(1).next_power_of_two(), dtype, &self.device)? };
                ROOM.with_borrow_mut(|rooms| rooms.insert(of, made.clone()));
                made
            }
        };
        self.at(of, &tensor, dtype, tensor.dims())
    }

    /// A tensor of zeros, for what a launch finds and leaves at zero.
    pub fn zeros(&self, shape: impl Into<candle_core::Shape>, dtype: DType) -> Result<Tensor> {
        Ok(Tensor::zeros(shape.into(), dtype, &self.device)?)
    }

    /// Copies host data to the device; an empty slice becomes one zero.
    pub fn upload<T: WithDType>(&self, data: &[T], shape: impl AsRef<[usize]>) -> Result<Tensor> {
        if data.is_empty() {
            return Ok(Tensor::zeros((1,), T::DTYPE, &self.device)?);
        }
        // What a tape does not hold must not be read by launches that are queued later.
        self.apart()?;
        self.copied(data, shape.as_ref())
    }

    fn copied<T: WithDType>(&self, data: &[T], shape: &[usize]) -> Result<Tensor> {
        Ok(Tensor::from_slice(data, shape, &self.device)?)
    }

    /// To be called before candle is asked for anything that reads what launches write: they are queued first, and this step
    /// goes by no [tape](super::tape).
    pub fn apart(&self) -> Result<()> {
        tape::apart()
    }

    /// Copies a tensor over another of its dtype and shape, which has other memory.
    pub fn copy(&self, parameter: &'static str, from: &Tensor, to: &Tensor) -> Result<()> {
        let (dtype, shape) = (from.dtype(), from.dims());
        let bytes = from.elem_count() * dtype.size_in_bytes();
        let (from, to) = (self.at(parameter, from, dtype, shape)?, self.at(parameter, to, dtype, shape)?);
        // SAFETY: both were checked, and are of that size.
        unsafe { self.launch(copy, &DeviceCopy { from, to, bytes }) }
    }

    /// Tensors of one dtype, one behind the other along the first dimension.
    pub fn stacked(&self, parts: &[Tensor]) -> Result<Tensor> {
        let [first, ..] = parts else { return Err(self.error("parts", 0, "at least one")) };
        let mut shape = first.dims().to_vec();
        shape[0] = parts.iter().map(|part| part.dims()[0]).sum();
        let out = self.empty(shape, first.dtype())?;
        let mut at = 0;
        for part in parts {
            let rows = part.dim(0)?;
            self.copy("parts", part, &out.narrow(0, at, rows)?)?;
            at += rows;
        }
        Ok(out)
    }

    /// The words of a tensor, once all that was queued before is done.
    pub fn read(&self, parameter: &'static str, tensor: &Tensor) -> Result<Vec<u32>> {
        tape::leave()?;
        let mut words = vec![0; tensor.elem_count()];
        let at = self.at::<u32>(parameter, tensor, DType::U32, tensor.dims())?;
        // SAFETY: there are so many words at the address, and the copy is waited for.
        let copied = unsafe { driver::memcpy_dtoh_async(&mut words, at as u64, self.stream.cu_stream()) };
        copied.and_then(|()| self.stream.synchronize()).map_err(candle_core::Error::wrap)?;
        Ok(words)
    }

    /// As [`Op::upload`], for what nothing writes to: equal data that this thread has copied lately is not copied again.
    pub fn kept<T: WithDType>(&self, data: &[T], shape: impl AsRef<[usize]>) -> Result<Tensor> {
        let shape = shape.as_ref();
        // SAFETY: numbers without padding.
        let bytes = unsafe { std::slice::from_raw_parts(data.as_ptr().cast::<u8>(), size_of_val(data)) };
        if bytes.is_empty() || bytes.len() > KEPT_BYTES {
            return self.upload(data, shape);
        }
        if let Some(tensor) = tape::input(self, (T::DTYPE, bytes), || self.copied(data, shape))? {
            return Ok(if tensor.dims() == shape { tensor } else { tensor.reshape(shape)? });
        }
        // Some of the bytes tell nearly all data apart; all of them are compared.
        let mix = |sum: u64, byte: &u8| (sum ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3);
        let some = bytes.iter().step_by(bytes.len().div_ceil(64)).chain(&bytes[bytes.len().saturating_sub(8)..]);
        let key = (T::DTYPE, bytes.len(), some.fold(0xcbf2_9ce4_8422_2325, mix));
        let found = KEPT.with_borrow(|kept| {
            let (known, tensor) = kept.get(&key)?;
            (**known == *bytes && tensor.device().same_device(&self.device)).then(|| tensor.clone())
        });
        let tensor = match found {
            Some(tensor) => tensor,
            None => {
                let tensor = self.copied(data, shape)?;
                KEPT.with_borrow_mut(|kept| {
                    if kept.len() >= KEPT_COPIES {
                        kept.clear();
                    }
                    kept.insert(key, (bytes.into(), tensor.clone()));
                });
                tensor
            }
        };
        Ok(if tensor.dims() == shape { tensor } else { tensor.reshape(shape)? })
    }

    /// A number as the interface takes it.
    pub fn int(&self, parameter: &'static str, x: usize) -> Result<i32> {
        i32::try_from(x).map_err(|_| self.error(parameter, x, "less than 2³¹"))
    }

    /// The interface's number of a dtype.
    pub fn dtype(&self, parameter: &'static str, dtype: DType) -> Result<i32> {
        match dtype {
            DType::BF16 => Ok(ffi::TAPER_BF16),
            DType::F16 => Ok(ffi::TAPER_F16),
            other => Err(self.error(parameter, format!("{other:?}"), "bf16 or f16")),
        }
    }

    /// Queues a launch.
    ///
    /// # Safety
    /// Every address in `p` is of memory as large as the numbers beside it say, and for the launch to use.
    pub unsafe fn launch<P: Copy + PartialEq + 'static>(&self, entry: Entry<P>, p: &P) -> Result<()> {
        RENEWED.set(None);
        // SAFETY: the caller's promise.
        match unsafe { tape::launch(self.stream.cu_stream(), entry, p) } {
            0 => Ok(()),
            status => Err(Error::Launch { op: self.name, status }),
        }
    }
}

/// A copy from the device to itself.
#[derive(Clone, Copy, PartialEq)]
struct DeviceCopy {
    from: *mut u8,
    to: *mut u8,
    bytes: usize,
}

unsafe extern "C" fn copy(p: *const DeviceCopy, stream: *mut c_void) -> i32 {
    // SAFETY: the caller's promise.
    let copied = unsafe {
        let DeviceCopy { from, to, bytes } = *p;
        driver::memcpy_dtod_async(to as u64, from as u64, bytes, stream.cast())
    };
    copied.map_or_else(|failed| failed.0 as i32, |()| 0)
}

/// Makes a device ready for steps: memory that a step gave back stays with the process instead of going back to the system
/// at every wait, and no events are made for every tensor. To be called before tensors are made, of a device with a stream of
/// its own (`Device::new_cuda_with_stream`), by the one thread that will use it, or by one that ends its use before another
/// begins. Anything but a CUDA device is left as it is.
///
/// # Errors
/// The driver's.
pub fn prepare(device: &Device) -> candle_core::Result<()> {
    let Device::Cuda(cuda) = device else { return Ok(()) };
    let stream = cuda.cuda_stream();
    stream.context().bind_to_thread().map_err(candle_core::Error::wrap)?;
    // SAFETY: all work of a device goes to candle's one stream of it, so no tensor is used by two streams at a time.
    unsafe { cuda.disable_event_tracking() };
    let mut pool = std::ptr::null_mut();
    let mut keep = u64::MAX;
    let number = stream.context().ordinal() as i32;
    let handle = driver::device::get(number).map_err(candle_core::Error::wrap)?;
    // SAFETY: plain calls on addresses of locals of the types that this attribute takes.
    let status = unsafe {
        match sys::cuDeviceGetDefaultMemPool(&raw mut pool, handle) {
            sys::CUresult::CUDA_SUCCESS => sys::cuMemPoolSetAttribute(
                pool,
                sys::CUmemPool_attribute::CU_MEMPOOL_ATTR_RELEASE_THRESHOLD,
                (&raw mut keep).cast(),
            ),
            failed => failed,
        }
    };
    status.result().map_err(candle_core::Error::wrap)?;
    // The driver compiles candle's kernels where they are first used, which takes seconds on a machine that has not seen them.
    let x = Tensor::zeros((2, 2), DType::F32, device)?;
    let ids = Tensor::zeros(2, DType::U32, device)?;
    let x = (x.index_select(&ids, 0)?.to_dtype(DType::BF16)?.to_dtype(DType::F32)?.sum(1)? + 1.0)?;
    Tensor::cat(&[&x, &x.sqr()?.maximum(&x)?], 0)?.to_vec1::<f32>().map(|_| ())
}

/// Thread blocks that share a list in launches that form teams: `taper_team` of the interface.
pub(super) fn team(list_heads: usize) -> usize {
    (128 / list_heads).clamp(1, 32)
}
