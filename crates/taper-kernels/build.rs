//! With the feature `cuda`: compiles kernels/ for sm_90a, links it, and turns kernels/taper_gpu.h, the one place where
//! the C interface is written down, into Rust declarations. Without it: nothing.

use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::{env, fs, thread};

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    if env::var_os("CARGO_FEATURE_CUDA").is_none() {
        return;
    }
    if let Err(error) = build() {
        println!("cargo::error={error}");
    }
}

fn build() -> Result<(), String> {
    let kernels = Path::new(&var("CARGO_MANIFEST_DIR")?).join("../../kernels");
    let out = PathBuf::from(var("OUT_DIR")?);
    println!("cargo::rerun-if-changed={}", kernels.display());
    println!("cargo::rerun-if-env-changed=PATH");
    println!("cargo::rerun-if-env-changed=CUDA_HOME");
    let header = kernels.join("taper_gpu.h");
    let header = fs::read_to_string(&header).map_err(|e| format!("{}: {e}", header.display()))?;
    fs::write(out.join("taper_gpu.rs"), declarations(&header)?).map_err(|e| e.to_string())?;

    let nvcc = nvcc()?;
    let objects = compile(&nvcc, &kernels, &out)?;
    let library = out.join("libtaper_gpu.a");
    let _ = fs::remove_file(&library);
    run(Command::new("ar").arg("crs").arg(&library).args(&objects))?;
    println!("cargo::rustc-link-search=native={}", out.display());
    println!("cargo::rustc-link-lib=static=taper_gpu");
    // The CUDA runtime stands beside the compiler.
    let home = nvcc.parent().and_then(Path::parent).map(Path::to_path_buf).unwrap_or_default();
    for folder in ["lib", "lib64", "targets/x86_64-linux/lib"].map(|f| home.join(f)).iter().filter(|f| f.exists()) {
        println!("cargo::rustc-link-search=native={}", folder.display());
    }
    println!("cargo::rustc-link-lib=dylib=cudart");
    println!("cargo::rustc-link-lib=dylib=stdc++");
    Ok(())
}

fn var(name: &str) -> Result<String, String> {
    env::var(name).map_err(|e| format!("{name}: {e}"))
}

/// The compiler: of CUDA_HOME, else of the PATH.
fn nvcc() -> Result<PathBuf, String> {
    let home = env::var_os("CUDA_HOME").map(|home| PathBuf::from(home).join("bin/nvcc"));
    let path = env::var_os("PATH").unwrap_or_default();
    let on_path = env::split_paths(&path).map(|folder| folder.join("nvcc"));
    home.into_iter().chain(on_path).find(|nvcc| nvcc.is_file()).ok_or_else(|| {
        "the feature `cuda` needs nvcc 13, which is neither in CUDA_HOME/bin nor on the PATH; eval \"$(scripts/cuda.sh)\" \
         finds one, or installs it"
            .into()
    })
}

/// Every kernels/*/*.cu, as many at a time as there are cores.
fn compile(nvcc: &Path, kernels: &Path, out: &Path) -> Result<Vec<PathBuf>, String> {
    let mut sources: Vec<PathBuf> = entries(kernels)?.into_iter().filter(|p| p.is_dir()).try_fold(
        Vec::new(),
        |mut all, folder| -> Result<_, String> {
            all.extend(entries(&folder)?.into_iter().filter(|p| p.extension().is_some_and(|e| e == "cu")));
            Ok(all)
        },
    )?;
    sources.sort();
    let object = |source: &Path| out.join(source.file_stem().unwrap_or_default()).with_extension("o");
    let one = |source: &Path| {
        let (flags, object) = (kernels.join("nvcc.flags"), object(source));
        let read = object.with_extension("d");
        if up_to_date(source, &object, &read, &[nvcc, &flags]) {
            return Ok(());
        }
        let mut command = Command::new(nvcc);
        command.arg("--options-file").arg(flags).arg("-MD").arg("-MF").arg(&read);
        run(command.arg("-c").arg(source).arg("-o").arg(&object))
    };
    let cores = thread::available_parallelism().map_or(1, usize::from);
    let shares = (0..cores).map(|i| sources.iter().skip(i).step_by(cores));
    thread::scope(|scope| {
        let jobs: Vec<_> = shares.map(|mut share| scope.spawn(move || share.try_for_each(|s| one(s)))).collect();
        jobs.into_iter().try_for_each(|job| job.join().map_err(|_| "a compile job panicked".to_owned())?)
    })?;
    Ok(sources.iter().map(|source| object(source)).collect())
}

/// Whether an object was made of this very source, since checkouts may share a target folder, and is newer than everything that
/// its compiler says it read, and than what it depends on besides.
fn up_to_date(source: &Path, object: &Path, read: &Path, besides: &[&Path]) -> bool {
    let changed = |path: &Path| fs::metadata(path).and_then(|m| m.modified()).ok();
    let (Some(made), Ok(rule)) = (changed(object), fs::read_to_string(read)) else { return false };
    // What is made, a colon, and what was read.
    let Some((_, files)) = rule.split_once(':') else { return false };
    let mut files = files.split_whitespace().filter(|word| *word != "\\").map(Path::new).peekable();
    files.peek() == Some(&source)
        && files.chain(besides.iter().copied()).all(|file| changed(file).is_some_and(|at| at < made))
}

fn entries(folder: &Path) -> Result<Vec<PathBuf>, String> {
    let read = fs::read_dir(folder).map_err(|e| format!("{}: {e}", folder.display()))?;
    Ok(read.filter_map(|entry| entry.ok().map(|e| e.path())).collect())
}

fn run(command: &mut Command) -> Result<(), String> {
    let output = command.output().map_err(|e| format!("{command:?}: {e}"))?;
    if output.status.success() {
        return Ok(());
    }
    let text = String::from_utf8_lossy(&output.stderr);
    let first: Vec<&str> = text.lines().take(12).collect();
    Err(format!("{command:?} failed: {}", first.join(" | ")))
}

/// Rust for the header's structures, constants and functions. It reads the C of that one file: declarations one after
/// the other, a statement each, `//` comments.
fn declarations(header: &str) -> Result<String, String> {
    let lines = header.lines().map(|line| line.split("//").next().unwrap_or(""));
    let code: Vec<&str> = lines.filter(|line| !line.trim_start().starts_with('#')).collect();
    let code = code.join("\n").replace("extern \"C\" {", "");
    let (mut out, mut functions, mut rest) = (String::new(), String::new(), code.as_str());
    while let Some(at) = rest.find([';', '{']) {
        let head = rest[..at].trim().trim_start_matches('}').trim();
        if rest[at..].starts_with(';') {
            if head.contains('(') {
                writeln!(functions, "    {}", function(head)?).map_err(|e| e.to_string())?;
            }
            rest = &rest[at + 1..];
            continue;
        }
        let close = at + rest[at..].find('}').ok_or("taper_gpu.h: a brace is not closed")?;
        let body = &rest[at + 1..close];
        if let Some(name) = head.strip_prefix("typedef struct ") {
            out.push_str(&structure(name.trim(), body)?);
        } else if head.starts_with("enum") {
            out.push_str(&constants(body)?);
        }
        // Functions with a body are for C alone.
        rest = &rest[close + 1..];
    }
    writeln!(out, "unsafe extern \"C\" {{\n{functions}}}").map_err(|e| e.to_string())?;
    Ok(out)
}

fn structure(name: &str, body: &str) -> Result<String, String> {
    let mut fields = String::new();
    for statement in body.split(';').map(str::trim).filter(|s| !s.is_empty()) {
        let statement = statement.split_whitespace().collect::<Vec<_>>().join(" ").replace(" *", "*");
        let (c_type, names) = match statement.rfind('*') {
            Some(star) => statement.split_at(star + 1),
            None => statement.split_once(' ').ok_or_else(|| format!("taper_gpu.h: {name}: {statement}"))?,
        };
        for field in names.split(',').map(str::trim) {
            let (field, kind) = match field.trim_end_matches(']').split_once('[') {
                Some((field, count)) => (field, format!("[{}; {count}]", rust_type(c_type)?)),
                None => (field, rust_type(c_type)?),
            };
            writeln!(fields, "    pub {field}: {kind},").map_err(|e| e.to_string())?;
        }
    }
    Ok(format!(
        "#[repr(C)]\n#[derive(Clone, Copy, PartialEq)]\npub struct {name} {{\n{fields}}}\n\
         // SAFETY: numbers and pointers alone, and structures of them.\n\
         unsafe impl bytemuck::Zeroable for {name} {{}}\n\n"
    ))
}

fn constants(body: &str) -> Result<String, String> {
    let (mut out, mut next) = (String::new(), 0);
    for item in body.split(',').map(str::trim).filter(|i| !i.is_empty()) {
        let (name, value) = match item.split_once('=') {
            Some((name, value)) => (name.trim(), value.trim().parse().map_err(|_| format!("taper_gpu.h: {item}"))?),
            None => (item, next),
        };
        writeln!(out, "pub const {name}: i32 = {value};").map_err(|e| e.to_string())?;
        next = value + 1;
    }
    Ok(out)
}

fn function(head: &str) -> Result<String, String> {
    let (front, arguments) =
        head.trim_end_matches(')').split_once('(').ok_or_else(|| format!("taper_gpu.h: {head}"))?;
    let (result, name) = front.trim().rsplit_once(' ').ok_or_else(|| format!("taper_gpu.h: {head}"))?;
    let mut typed = Vec::new();
    for argument in arguments.split(',').map(str::trim) {
        let (c_type, name) = argument.rsplit_once(' ').ok_or_else(|| format!("taper_gpu.h: {head}"))?;
        typed.push(format!("{name}: {}", rust_type(c_type)?));
    }
    Ok(format!("pub fn {name}({}) -> {};", typed.join(", "), rust_type(result)?))
}

fn rust_type(c_type: &str) -> Result<String, String> {
    let c_type = c_type.trim();
    if let Some(target) = c_type.strip_suffix('*') {
        let target = target.trim();
        return Ok(match target.strip_prefix("const ") {
            Some(target) => format!("*const {}", rust_type(target)?),
            None => format!("*mut {}", rust_type(target)?),
        });
    }
    Ok(match c_type {
        "void" => "std::ffi::c_void",
        "int" | "int32_t" => "i32",
        "uint32_t" => "u32",
        "int64_t" => "i64",
        "uint64_t" => "u64",
        "uint16_t" => "u16",
        "float" => "f32",
        "double" => "f64",
        "TaperStream" => "*mut std::ffi::c_void",
        name if name.starts_with("Taper") => name,
        other => return Err(format!("taper_gpu.h: type {other}")),
    }
    .to_owned())
}
