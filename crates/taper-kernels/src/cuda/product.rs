//! Products of activations with a float weight, with what stands around them in a layer: by a kernel of this project for a
//! few rows, where the weight's bytes are what takes time, and by cuBLAS for more.

use super::error::Result;
use super::ffi::{self, TaperChainParams, TaperProductParams, taper_chain, taper_product};
use super::layer::{norm_f32, rounded, silu_mul};
use super::op::Op;
use bytemuck::Zeroable;
use candle_core::cuda_backend::cudarc::cublas::{result as cublas, sys};
use candle_core::{DType, Device, Tensor};
use std::cell::RefCell;
use std::ffi::c_void;

/// Most rows of a product by this project's kernel, and most bytes of its inputs. From three rows on cuBLAS is faster, with
/// the launches that it takes besides.
const ROWS_MAX: usize = 2;
const INPUT_BYTES_MAX: usize = 220 * 1024;
/// Fewest bytes of weights between two attentions that have one launch for all: below, their meetings take longer than launches.
const CHAIN_BYTES_MIN: usize = 64 << 20;

thread_local! {
    /// Counters of the launches in which products follow one another, one tensor for each device: such launches leave them at
    /// zero.
    static COUNTERS: RefCell<Vec<Tensor>> = RefCell::default();
}

/// Activations on their way into a product.
#[derive(Clone, Copy)]
pub struct Inputs<'a> {
    /// `[T, inputs]`, f32 or the weight's dtype.
    pub x: &'a Tensor,
    /// The weight `[inputs]`, f32, and the epsilon of a root-mean-square normalisation that goes before.
    pub norm: Option<(&'a Tensor, f32)>,
}

/// `x Wᵀ` for a weight `[outputs, inputs]`, bf16 or f16: `[T, outputs]`, f32 or the weight's dtype.
///
/// # Errors
/// Shapes or dtypes that differ; widths that are not multiples of 8.
pub fn product(of: Inputs, weight: &Tensor, out: DType) -> Result<Tensor> {
    let op = Op::new("product", "x", of.x)?;
    let (rows, outputs) = (of.x.dim(0)?, weight.dim(0)?);
    let made = op.empty((rows, outputs), out)?;
    product_into(of, weight, &made)?;
    Ok(made)
}

/// As [`product`], into a tensor `[T, outputs]`, f32 or of the weight's dtype, which is written over.
///
/// # Errors
/// As [`product`].
pub fn product_into(of: Inputs, weight: &Tensor, out: &Tensor) -> Result<()> {
    let op = Op::new("product_into", "x", of.x)?;
    let to = if out.dtype() == DType::F32 { ffi::TAPER_PRODUCT_F32 } else { ffi::TAPER_PRODUCT_SAME };
    run(&op, of, weight, out, (to, out.dtype()))
}

/// Adds `x Wᵀ` to `sum` `[T, outputs]`, f32, in place.
///
/// # Errors
/// As [`product`].
pub fn product_add(of: Inputs, weight: &Tensor, sum: &Tensor) -> Result<()> {
    let op = Op::new("product_add", "x", of.x)?;
    run(&op, of, weight, sum, (ffi::TAPER_PRODUCT_ADD, DType::F32))
}

/// silu(gate) · up of the two halves of `x Wᵀ`, gate first: `[T, outputs / 2]` of the weight's dtype.
///
/// # Errors
/// As [`product`].
pub fn product_gated(of: Inputs, weight: &Tensor) -> Result<Tensor> {
    let op = Op::new("product_gated", "x", of.x)?;
    let (rows, outputs, dtype) = (of.x.dim(0)?, weight.dim(0)?, weight.dtype());
    if !few(of.x, rows)? {
        return silu_mul(&product(of, weight, dtype)?);
    }
    let made = op.empty((rows, outputs / 2), dtype)?;
    run(&op, of, weight, &made, (ffi::TAPER_PRODUCT_GATED, dtype))?;
    Ok(made)
}

/// What stands between one layer's attention and the next one's.
#[derive(Clone, Copy)]
pub struct AfterAttention<'a> {
    /// Of the heads' outputs: its product is added to the residual stream.
    pub output: &'a Tensor,
    /// The normalisation before the feed-forward layer, as [`Inputs::norm`].
    pub norm: (&'a Tensor, f32),
    /// Gate and what it gates.
    pub gate_up: &'a Tensor,
    /// Back to the residual stream.
    pub down: &'a Tensor,
    /// The next layer's normalisation, its projections' weight, and the tensor that they are written over.
    pub next: Option<((&'a Tensor, f32), &'a Tensor, &'a Tensor)>,
}

/// The way from the outputs of a layer's heads `[T, q_heads head_dim]` to the next layer's projections; the residual stream
/// `x` `[T, hidden]`, f32, is changed in place. In one launch where there is one row and the weights are large.
///
/// # Errors
/// As [`product`].
pub fn after_attention(attended: &Tensor, x: &Tensor, of: &AfterAttention) -> Result<()> {
    let next = of.next.map_or(of.down, |next| next.1);
    let weights = [of.output, of.gate_up, of.down, next];
    let like =
        |w: &&Tensor| w.dtype() == of.down.dtype() && w.dims().last() <= Some(&(ffi::TAPER_CHAIN_INPUTS as usize));
    let bytes: usize = weights[..3].iter().map(|w| w.elem_count() * w.dtype().size_in_bytes()).sum();
    if x.dim(0)? == 1 && weights.iter().all(like) && bytes >= CHAIN_BYTES_MIN {
        return after_attention_at_once(attended, x, of);
    }
    let normed = |norm| Inputs { x, norm: Some(norm) };
    product_add(Inputs { x: attended, norm: None }, of.output, x)?;
    let inner = product_gated(normed(of.norm), of.gate_up)?;
    product_add(Inputs { x: &inner, norm: None }, of.down, x)?;
    of.next.map_or(Ok(()), |(norm, weight, out)| product_into(normed(norm), weight, out))
}

/// The same by one launch, of one row and weights of one dtype and at most 16,384 inputs: to the bit what the products give one
/// by one. Its thread blocks wait for all others, so no other launch that does may run beside it on the same device.
///
/// # Errors
/// As [`product`], more rows or inputs.
pub fn after_attention_at_once(attended: &Tensor, x: &Tensor, of: &AfterAttention) -> Result<()> {
    let op = Op::new("after_attention", "x", x)?;
    let dtype = of.gate_up.dtype();
    let inner = op.empty((x.dim(0)?, of.gate_up.dim(0)? / 2), dtype)?;
    let add = (ffi::TAPER_PRODUCT_ADD, DType::F32);
    let normed = |norm| Inputs { x, norm: Some(norm) };
    let mut p = TaperChainParams { count: 3, sync: counters(&op)?, ..TaperChainParams::zeroed() };
    p.products[0] = params(&op, Inputs { x: attended, norm: None }, of.output, x, add)?;
    p.products[1] = params(&op, normed(of.norm), of.gate_up, &inner, (ffi::TAPER_PRODUCT_GATED, dtype))?;
    p.products[2] = params(&op, Inputs { x: &inner, norm: None }, of.down, x, add)?;
    if let Some((norm, weight, out)) = of.next {
        let to = if out.dtype() == DType::F32 { ffi::TAPER_PRODUCT_F32 } else { ffi::TAPER_PRODUCT_SAME };
        p.products[3] = params(&op, normed(norm), weight, out, (to, out.dtype()))?;
        p.count = 4;
    }
    let most = ffi::TAPER_CHAIN_INPUTS;
    let fits = p.products[..p.count as usize].iter().all(|of| of.rows == 1 && of.inputs <= most);
    op.check(
        fits,
        "x",
        format_args!("{:?}, weights {:?}", x.dims(), of.down.dims()),
        format_args!("one row, {most} inputs"),
    )?;
    // SAFETY: every address was checked against the shapes given beside it.
    unsafe { op.launch(taper_chain, &p) }
}

/// The address of 32 words at zero, for launches one after the other.
fn counters(op: &Op) -> Result<*mut u32> {
    let known = |known: &Vec<Tensor>| known.iter().find(|t| t.device().same_device(&op.device)).cloned();
    let words = match COUNTERS.with_borrow(known) {
        Some(words) => words,
        None => {
            let made = op.zeros(32, DType::U32)?;
            COUNTERS.with_borrow_mut(|known| known.push(made.clone()));
            made
        }
    };
    op.at("counters", &words, DType::U32, [32])
}

/// Whether products of so many rows are cuBLAS's, which takes inputs of the weight's dtype.
pub(super) fn takes_sixteen(rows: usize) -> bool {
    rows > ROWS_MAX
}

/// Whether a product is one for this project's kernel.
fn few(x: &Tensor, rows: usize) -> Result<bool> {
    Ok(rows <= ROWS_MAX && rows * x.dim(1)? * 2 <= INPUT_BYTES_MAX)
}

fn run(op: &Op, of: Inputs, weight: &Tensor, out: &Tensor, (to, out_dtype): (i32, DType)) -> Result<()> {
    checked(op, of.x, weight, out_dtype)?;
    let dtype = weight.dtype();
    if !few(of.x, of.x.dim(0)?)? {
        let x = match of.norm {
            Some((weight, epsilon)) => norm_f32(&of.x.to_dtype(DType::F32)?, weight, epsilon, dtype)?,
            None if of.x.dtype() == DType::F32 && of.x.is_contiguous() => rounded(of.x, dtype)?,
            None => of.x.clone(),
        };
        return multiply(op, &x.to_dtype(dtype)?, weight, out, (to == ffi::TAPER_PRODUCT_ADD, out_dtype));
    }
    let p = params(op, of, weight, out, (to, out_dtype))?;
    // SAFETY: every address was checked against the shapes given beside it.
    unsafe { op.launch(taper_product, &p) }
}

/// Fails unless shapes and dtypes are those of a product: rows, inputs, outputs.
fn checked(op: &Op, x: &Tensor, weight: &Tensor, out_dtype: DType) -> Result<(usize, usize, usize)> {
    let ((rows, inputs), (outputs, columns), dtype) = (x.dims2()?, weight.dims2()?, weight.dtype());
    let fits = columns == inputs && inputs.is_multiple_of(8) && outputs.is_multiple_of(8) && rows > 0;
    op.check(fits, "weight", format_args!("{:?}", weight.dims()), format_args!("[outputs, {inputs}], multiples of 8"))?;
    let kinds = matches!(dtype, DType::BF16 | DType::F16) && (out_dtype == DType::F32 || out_dtype == dtype);
    op.check(kinds, "out", format_args!("{out_dtype:?}"), format_args!("F32 or {dtype:?}, of a bf16 or f16 weight"))?;
    Ok((rows, inputs, outputs))
}

/// A product as the interface takes it.
fn params(
    op: &Op,
    of: Inputs,
    weight: &Tensor,
    out: &Tensor,
    (to, out_dtype): (i32, DType),
) -> Result<TaperProductParams> {
    let (rows, inputs, outputs) = checked(op, of.x, weight, out_dtype)?;
    let dtype = weight.dtype();
    let wide = if to == ffi::TAPER_PRODUCT_GATED { outputs / 2 } else { outputs };
    let x_f32 = of.x.dtype() == DType::F32;
    Ok(TaperProductParams {
        x: op.at("x", of.x, if x_f32 { DType::F32 } else { dtype }, [rows, inputs])?,
        weight: op.at("weight", weight, dtype, [outputs, inputs])?,
        norm: op.maybe("norm", of.norm.map(|norm| norm.0), DType::F32, [inputs])?,
        out: op.at("out", out, out_dtype, [rows, wide])?,
        rows: op.int("x", rows)?,
        inputs: op.int("x", inputs)?,
        outputs: op.int("weight", outputs)?,
        dtype: op.dtype("weight", dtype)?,
        x_f32: x_f32.into(),
        to,
        epsilon: of.norm.map_or(0.0, |norm| norm.1),
    })
}

/// cuBLAS: `out = x Wᵀ`, or `out += x Wᵀ`, with sums in f32.
fn multiply(op: &Op, x: &Tensor, weight: &Tensor, out: &Tensor, (add, out_dtype): (bool, DType)) -> Result<()> {
    let ((rows, inputs), outputs, dtype) = (x.dims2()?, weight.dim(0)?, weight.dtype());
    let Device::Cuda(device) = &op.device else { return Err(op.error("x", "not on a CUDA device", "a CUDA tensor")) };
    let kind = |dtype| match dtype {
        DType::BF16 => sys::cudaDataType::CUDA_R_16BF,
        DType::F16 => sys::cudaDataType::CUDA_R_16F,
        _ => sys::cudaDataType::CUDA_R_32F,
    };
    let address = |name, tensor: &Tensor, dtype, shape: [usize; 2]| op.at::<c_void>(name, tensor, dtype, shape);
    let p = Gemm {
        handle: *device.cublas_handle().handle(),
        weight: address("weight", weight, dtype, [outputs, inputs])?,
        x: address("x", x, dtype, [rows, inputs])?,
        out: address("out", out, out_dtype, [rows, outputs])?,
        shape: [op.int("weight", outputs)?, op.int("x", rows)?, op.int("x", inputs)?],
        kinds: [kind(dtype), kind(out_dtype)],
        beta: if add { 1.0 } else { 0.0 },
    };
    // SAFETY: every address was checked against the shapes given beside it.
    unsafe { op.launch(gemm, &p) }
}

/// A product of [`multiply`], as cuBLAS takes it.
#[derive(Clone, Copy, PartialEq)]
struct Gemm {
    handle: sys::cublasHandle_t,
    weight: *const c_void,
    x: *const c_void,
    out: *mut c_void,
    /// Outputs, rows, inputs.
    shape: [i32; 3],
    /// Of weight and inputs, and of outputs.
    kinds: [sys::cudaDataType; 2],
    beta: f32,
}

/// On the handle's own stream, which is candle's. Returns 0, or 10000 and cuBLAS's status.
unsafe extern "C" fn gemm(p: *const Gemm, _stream: *mut c_void) -> i32 {
    // SAFETY: the caller's promise; a row-major `[a, b]` is a column-major `[b, a]`.
    let status = unsafe {
        let one = 1f32;
        let Gemm { handle, weight, x, out, shape: [m, n, k], kinds: [dtype, out_dtype], beta } = *p;
        cublas::gemm_ex(
            handle,
            sys::cublasOperation_t::CUBLAS_OP_T,
            sys::cublasOperation_t::CUBLAS_OP_N,
            m,
            n,
            k,
            (&raw const one).cast(),
            weight,
            dtype,
            k,
            x,
            dtype,
            k,
            (&raw const beta).cast(),
            out,
            out_dtype,
            m,
            sys::cublasComputeType_t::CUBLAS_COMPUTE_32F,
            sys::cublasGemmAlgo_t::CUBLAS_GEMM_DEFAULT_TENSOR_OP,
        )
    };
    status.map_or_else(|failed| 10_000 + failed.0 as i32, |()| 0)
}
