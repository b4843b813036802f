//! A pool whose tail lies in pinned host memory: one range of addresses, mapped over the device's memory first and the
//! host's after it, so that no kernel sees where one ends. What is read of the tail comes over the bus as it is read.

use crate::kv::with_kv_element;
use candle_core::cuda_backend::CudaStorageSlice;
use candle_core::cuda_backend::cudarc::driver::{CudaStream, DriverError, sys};
use candle_core::op::BackpropOp;
use candle_core::{
    CpuStorage, CudaDevice, CudaStorage, DType, Device, Error, InplaceOp1, Layout, Result, Storage, Tensor, bail,
};
use std::mem::MaybeUninit;
use std::sync::Arc;
use sys::CUmemLocationType as Place;

/// The memory behind such a pool. It goes when this is dropped: whoever still has the pool finds nothing in it then.
#[derive(Debug)]
pub struct HostTail {
    pool: Tensor,
    range: Range,
}

impl HostTail {
    /// A pool `[blocks, …]` of zeros (f32, f16 or bf16), whose first `memory` blocks lie on the device. The host's part
    /// begins and ends with a page of the driver's, 2 MiB: what the blocks do not fill of the first is the device's.
    ///
    /// # Errors
    /// More bytes than the device or the host can give, or a device without such mappings.
    pub fn zeros(
        dims: (usize, usize, usize, usize),
        dtype: DType,
        memory: usize,
        device: &Device,
    ) -> Result<(Tensor, Self)> {
        let Device::Cuda(cuda) = device else { bail!("a tail in pinned host memory of a pool on {device:?}") };
        let block = dims.1 * dims.2 * dims.3;
        if memory > dims.0 || dims.0 * block == 0 {
            bail!("a pool {dims:?} of which {memory} blocks lie on the device");
        }
        let bytes = block * dtype.size_in_bytes();
        let range = Range::new(cuda, memory * bytes, dims.0 * bytes)?;
        let storage = with_kv_element!(dtype, T => {
            // SAFETY: the range covers so many elements, of which any bits are valid, and the slice is taken out of the
            // tensor before the range goes.
            let slice = unsafe { range.stream.upgrade_device_ptr::<T>(range.start, dims.0 * block) };
            CudaStorage::wrap_cuda_slice(slice, cuda.clone())
        });
        let pool = Tensor::from_storage(Storage::Cuda(storage), dims, BackpropOp::none(), false);
        Ok((pool.clone(), Self { pool, range }))
    }

    /// Bytes of the host's memory that it holds.
    pub fn host_bytes(&self) -> usize {
        self.range.host
    }
}

impl Drop for HostTail {
    fn drop(&mut self) {
        // What cannot be taken out, or is being used by work that does not end, is kept for good.
        if self.pool.inplace_op1(&Take).is_err() || self.range.stream.synchronize().is_err() {
            (self.range.mapped, self.range.bytes) = (0, 0);
        }
    }
}

/// Takes the slice out of a pool without freeing what it points to. What is left is of a type that no pool has, so that
/// operations refuse it.
struct Take;

impl InplaceOp1 for Take {
    fn name(&self) -> &'static str {
        "kv-offload"
    }

    fn cpu_fwd(&self, _: &mut CpuStorage, _: &Layout) -> Result<()> {
        bail!("offload: a pool in host memory")
    }

    fn cuda_fwd(&self, pool: &mut CudaStorage, _: &Layout) -> Result<()> {
        let device = pool.device.clone();
        let empty = CudaStorageSlice::U8(device.alloc_zeros::<u8>(1)?);
        match std::mem::replace(&mut pool.slice, empty) {
            CudaStorageSlice::F32(slice) => slice.leak(),
            CudaStorageSlice::F16(slice) => slice.leak(),
            CudaStorageSlice::BF16(slice) => slice.leak(),
            _ => bail!("offload: not a pool"),
        };
        Ok(())
    }
}

/// A range of a device's addresses, mapped over its own memory and the host's.
#[derive(Debug)]
struct Range {
    start: sys::CUdeviceptr,
    /// Addresses reserved, and how many of them are mapped.
    bytes: usize,
    mapped: usize,
    /// Those mapped over the host's memory.
    host: usize,
    stream: Arc<CudaStream>,
}

impl Range {
    /// A range of zeros, `head` bytes of which at least lie on the device.
    fn new(device: &CudaDevice, head: usize, bytes: usize) -> Result<Self> {
        let stream = device.cuda_stream();
        stream.context().bind_to_thread().map_err(Error::wrap)?;
        let on_device = memory(Place::CU_MEM_LOCATION_TYPE_DEVICE, stream.context().ordinal() as i32);
        let on_host = memory(Place::CU_MEM_LOCATION_TYPE_HOST_NUMA, numa_node(&stream)?);
        let page = page_bytes(&on_device)?.max(page_bytes(&on_host)?);
        let bytes = bytes.next_multiple_of(page);
        let head = head.next_multiple_of(page).min(bytes);
        let mut range = Self { start: 0, bytes, mapped: 0, host: bytes - head, stream };
        // SAFETY: the address is a local's.
        unsafe { sys::cuMemAddressReserve(&raw mut range.start, bytes, 0, 0, 0) }
            .result()
            .map_err(|error| Error::msg(format!("{bytes} bytes of addresses: {error}")))?;
        range
            .map(&on_device, head)
            .map_err(|error| Error::msg(format!("{head} bytes of the device's memory: {error}")))?;
        let host = range.host;
        range
            .map(&on_host, host)
            .map_err(|error| Error::msg(format!("{host} bytes of pinned host memory: {error}")))?;
        range.let_the_device_in(&on_device.location).map_err(Error::wrap)?;
        Ok(range)
    }

    /// Maps the next addresses over new memory.
    fn map(&mut self, of: &sys::CUmemAllocationProp, bytes: usize) -> std::result::Result<(), DriverError> {
        if bytes == 0 {
            return Ok(());
        }
        let mut handle = 0;
        // SAFETY: addresses of locals; the pages are within the reserved range and nothing is mapped there yet. Memory stays
        // as long as it is mapped, without a handle.
        unsafe {
            sys::cuMemCreate(&raw mut handle, bytes, of, 0).result()?;
            let mapped = sys::cuMemMap(self.start + self.mapped as u64, bytes, 0, handle, 0).result();
            let released = sys::cuMemRelease(handle).result();
            mapped?;
            self.mapped += bytes;
            released
        }
    }

    /// Lets kernels read and write all of it, and fills it with zeros.
    fn let_the_device_in(&self, device: &sys::CUmemLocation) -> std::result::Result<(), DriverError> {
        let flags = sys::CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
        let access = sys::CUmemAccessDesc { location: *device, flags };
        // SAFETY: the whole range is mapped.
        unsafe {
            sys::cuMemSetAccess(self.start, self.bytes, &access, 1).result()?;
            sys::cuMemsetD8Async(self.start, 0, self.bytes, self.stream.cu_stream()).result()
        }
    }
}

impl Drop for Range {
    fn drop(&mut self) {
        if self.bytes == 0 || self.start == 0 || self.stream.context().bind_to_thread().is_err() {
            return;
        }
        // SAFETY: nobody has these addresses any more. If they cannot be given back they are kept.
        unsafe {
            let unmapped = self.mapped == 0 || sys::cuMemUnmap(self.start, self.mapped).result().is_ok();
            if unmapped {
                let _ = sys::cuMemAddressFree(self.start, self.bytes);
            }
        }
    }
}

/// Pinned memory of a place.
fn memory(place: Place, number: i32) -> sys::CUmemAllocationProp {
    // SAFETY: numbers, null pointers and enumerations that have a zero.
    let mut of: sys::CUmemAllocationProp = unsafe { MaybeUninit::zeroed().assume_init() };
    of.type_ = sys::CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED;
    of.location.type_ = place;
    // The place's number comes right after its type. Newer versions of CUDA call it otherwise.
    // SAFETY: the structure is two numbers of 32 bits.
    unsafe { (&raw mut of.location).cast::<i32>().add(1).write(number) };
    of
}

/// The host's memory that is nearest to the device.
fn numa_node(stream: &CudaStream) -> Result<i32> {
    use sys::CUdevice_attribute as Attribute;
    let ask = |attribute| stream.context().attribute(attribute).map_err(Error::wrap);
    if ask(Attribute::CU_DEVICE_ATTRIBUTE_HOST_NUMA_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED)? == 0 {
        bail!("the device or its driver cannot map the host's memory into a range of its own");
    }
    Ok(ask(Attribute::CU_DEVICE_ATTRIBUTE_HOST_NUMA_ID)?.max(0))
}

/// The pages that such memory comes in.
fn page_bytes(of: &sys::CUmemAllocationProp) -> Result<usize> {
    let mut bytes = 0;
    let least = sys::CUmemAllocationGranularity_flags::CU_MEM_ALLOC_GRANULARITY_MINIMUM;
    // SAFETY: addresses of a local and of a whole structure.
    unsafe { sys::cuMemGetAllocationGranularity(&raw mut bytes, of, least) }.result().map_err(Error::wrap)?;
    Ok(bytes)
}
