//! Products of activations with a float weight, with what stands around them in a layer: by a kernel of this project for a
//! few rows, where the weight's bytes are what takes time, and by cuBLAS for more.

use super::error::{Error, Result};
use super::ffi::{self, TaperProductParams, taper_product};
use super::layer::{norm_f32, silu_mul};
use super::op::Op;
use candle_core::cuda_backend::cudarc::cublas::{result as cublas, sys};
use candle_core::{DType, Device, Tensor};

/// Most rows of a product by this project's kernel, and most bytes of its inputs. From three rows on cuBLAS is faster, with
/// the launches that it takes besides.
const ROWS_MAX: usize = 2;
const INPUT_BYTES_MAX: usize = 220 * 1024;

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

/// Whether products of so many rows are cuBLAS's, which takes inputs of the weight's dtype.
pub(super) fn takes_sixteen(rows: usize) -> bool {
    rows > ROWS_MAX
}

/// Whether a product is one for this project's kernel.
fn few(x: &Tensor, rows: usize) -> Result<bool> {
    Ok(rows <= ROWS_MAX && rows * x.dim(1)? * 2 <= INPUT_BYTES_MAX)
}

fn run(op: &Op, of: Inputs, weight: &Tensor, out: &Tensor, (to, out_dtype): (i32, DType)) -> Result<()> {
    let ((rows, inputs), (outputs, columns), dtype) = (of.x.dims2()?, weight.dims2()?, weight.dtype());
    let fits = columns == inputs && inputs.is_multiple_of(8) && outputs.is_multiple_of(8) && rows > 0;
    op.check(fits, "weight", format!("{:?}", weight.dims()), format!("[outputs, {inputs}], multiples of 8"))?;
    let kinds = matches!(dtype, DType::BF16 | DType::F16) && (out_dtype == DType::F32 || out_dtype == dtype);
    op.check(kinds, "out", format!("{out_dtype:?}"), format!("F32 or {dtype:?}, of a bf16 or f16 weight"))?;
    let wide = if to == ffi::TAPER_PRODUCT_GATED { outputs / 2 } else { outputs };
    let x_f32 = of.x.dtype() == DType::F32;
    if !few(of.x, rows)? {
        let x = match of.norm {
            Some((weight, epsilon)) => norm_f32(&of.x.to_dtype(DType::F32)?, weight, epsilon, dtype)?,
            None => of.x.clone(),
        };
        return multiply(op, &x.to_dtype(dtype)?, weight, out, (to == ffi::TAPER_PRODUCT_ADD, out_dtype));
    }
    let p = TaperProductParams {
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
        overlap: 1,
        epsilon: of.norm.map_or(0.0, |norm| norm.1),
    };
    // SAFETY: every address was checked against the shapes given beside it.
    op.launched(unsafe { taper_product(&p, op.stream()) })
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
    let (one, beta) = (1f32, if add { 1f32 } else { 0f32 });
    let address =
        |name, tensor: &Tensor, dtype, shape: [usize; 2]| op.at::<std::ffi::c_void>(name, tensor, dtype, shape);
    let (m, n, k) = (op.int("weight", outputs)?, op.int("x", rows)?, op.int("x", inputs)?);
    let blas = device.cublas_handle();
    // SAFETY: every address was checked against the shapes given beside it; a row-major `[a, b]` is a column-major `[b, a]`.
    let status = unsafe {
        cublas::gemm_ex(
            *blas.handle(),
            sys::cublasOperation_t::CUBLAS_OP_T,
            sys::cublasOperation_t::CUBLAS_OP_N,
            m,
            n,
            k,
            (&raw const one).cast(),
            address("weight", weight, dtype, [outputs, inputs])?,
            kind(dtype),
            k,
            address("x", x, dtype, [rows, inputs])?,
            kind(dtype),
            k,
            (&raw const beta).cast(),
            address("out", out, out_dtype, [rows, outputs])?,
            kind(out_dtype),
            m,
            sys::cublasComputeType_t::CUBLAS_COMPUTE_32F,
            sys::cublasGemmAlgo_t::CUBLAS_GEMM_DEFAULT_TENSOR_OP,
        )
    };
    status.map_err(|e| Error::Candle(candle_core::Error::wrap(e)))
}
