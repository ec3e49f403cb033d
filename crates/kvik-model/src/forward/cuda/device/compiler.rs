//! Kernels are compiled when a model is loaded, by the toolkit's run-time compiler, and kept for the next time.

use std::ffi::{CString, c_char, c_int, c_void};
use std::fs;
use std::path::Path;
use std::ptr;

use libloading::Library;
use tracing::{debug, warn};
use xxhash_rust::xxh3::xxh3_128;

use crate::error::{ModelError, Result};

/// Where the run-time compiler is looked for: by name on the loader's path, then where toolkits are installed.
const LIBRARIES: [&str; 5] = [
    "libnvrtc.so.13",
    "libnvrtc.so.12",
    "libnvrtc.so",
    "/usr/local/cuda/lib64/libnvrtc.so",
    "/usr/lib/x86_64-linux-gnu/libnvrtc.so",
];

/// Options of every compilation: this chip, no contraction, which would let results depend on what the compiler inlines.
const OPTIONS: [&str; 4] =
    ["--gpu-architecture=sm_90a", "--std=c++17", "--fmad=false", "--diag-suppress=177"];

/// The compiler's answer to a call that went well.
const SUCCESS: c_int = 0;

type Program = *mut c_void;

/// The compiler's calls that are used.
struct Compiler {
    create: unsafe extern "C" fn(
        *mut Program,
        *const c_char,
        *const c_char,
        c_int,
        *const *const c_char,
        *const *const c_char,
    ) -> c_int,
    compile: unsafe extern "C" fn(Program, c_int, *const *const c_char) -> c_int,
    log_size: unsafe extern "C" fn(Program, *mut usize) -> c_int,
    log: unsafe extern "C" fn(Program, *mut c_char) -> c_int,
    code_size: unsafe extern "C" fn(Program, *mut usize) -> c_int,
    code: unsafe extern "C" fn(Program, *mut c_char) -> c_int,
    destroy: unsafe extern "C" fn(*mut Program) -> c_int,
    version: (c_int, c_int),
    /// Keeps the calls.
    _library: Library,
}

/// Compiles `source` with `definitions`, or takes what an earlier process left in `cache`.
///
/// # Errors
/// If there is no compiler, or it refuses.
pub(in super::super) fn compile(
    source: &str,
    definitions: &[String],
    cache: Option<&Path>,
) -> Result<Vec<u8>> {
    let compiler = Compiler::load()?;
    let options: Vec<&str> = OPTIONS.into_iter().chain(definitions.iter().map(String::as_str)).collect();
    let (major, minor) = compiler.version;
    let name = format!("{source}\0{}\0{major}.{minor}", options.join("\0"));
    let path = cache.map(|folder| folder.join(format!("kernels-{:032x}.cubin", xxh3_128(name.as_bytes()))));
    if let Some(code) = path.as_deref().and_then(read_kept) {
        return Ok(code);
    }
    let code = compiler.run(source, &options)?;
    if let Some(path) = &path
        && let Err(error) = keep(path, &code)
    {
        warn!(path = %path.display(), %error, "cannot keep compiled kernels");
    }
    Ok(code)
}

/// What an earlier process kept: the code behind its hash. Anything else is not taken.
fn read_kept(path: &Path) -> Option<Vec<u8>> {
    let bytes = fs::read(path).ok()?;
    let (hash, code) = bytes.split_first_chunk::<16>()?;
    let is_whole = u128::from_le_bytes(*hash) == xxh3_128(code);
    debug!(path = %path.display(), is_whole, "found compiled kernels");
    is_whole.then(|| code.to_vec())
}

/// Writes the code behind its hash; another process sees the whole file or none.
fn keep(path: &Path, code: &[u8]) -> std::io::Result<()> {
    if let Some(folder) = path.parent() {
        fs::create_dir_all(folder)?;
    }
    let part = path.with_extension(format!("{}.part", std::process::id()));
    let mut bytes = xxh3_128(code).to_le_bytes().to_vec();
    bytes.extend_from_slice(code);
    fs::write(&part, bytes)?;
    fs::rename(&part, path)
}

impl Compiler {
    fn load() -> Result<Self> {
        // SAFETY: opening the library runs its initializers, which is what it is opened for.
        let open = |name: &&str| unsafe { Library::new(*name) }.ok();
        let Some(library) = LIBRARIES.iter().find_map(open) else {
            let reason = format!("the run-time compiler was not found; looked for {}", LIBRARIES.join(", "));
            return Err(ModelError::Device { call: "load NVRTC", reason });
        };
        let missing =
            |error: libloading::Error| ModelError::Device { call: "load NVRTC", reason: error.to_string() };
        let mut version = (0, 0);
        // SAFETY: the types are those of the toolkit's header, which have not changed since version 11.
        unsafe {
            let ask: unsafe extern "C" fn(*mut c_int, *mut c_int) -> c_int =
                *library.get(b"nvrtcVersion").map_err(missing)?;
            ask(&raw mut version.0, &raw mut version.1);
            Ok(Self {
                create: *library.get(b"nvrtcCreateProgram").map_err(missing)?,
                compile: *library.get(b"nvrtcCompileProgram").map_err(missing)?,
                log_size: *library.get(b"nvrtcGetProgramLogSize").map_err(missing)?,
                log: *library.get(b"nvrtcGetProgramLog").map_err(missing)?,
                code_size: *library.get(b"nvrtcGetCUBINSize").map_err(missing)?,
                code: *library.get(b"nvrtcGetCUBIN").map_err(missing)?,
                destroy: *library.get(b"nvrtcDestroyProgram").map_err(missing)?,
                version,
                _library: library,
            })
        }
    }

    fn run(&self, source: &str, options: &[&str]) -> Result<Vec<u8>> {
        let refused = |reason: String| ModelError::Device { call: "compile kernels", reason };
        let text = |text: &str| CString::new(text).map_err(|error| refused(error.to_string()));
        let source = text(source)?;
        let options = options.iter().copied().map(text).collect::<Result<Vec<CString>>>()?;
        let pointers: Vec<*const c_char> = options.iter().map(|option| option.as_ptr()).collect();
        let mut program = ptr::null_mut();
        // SAFETY: the program goes to a local; both texts end with a null byte; there are no headers.
        let created = unsafe {
            (self.create)(&raw mut program, source.as_ptr(), c"kvik.cu".as_ptr(), 0, ptr::null(), ptr::null())
        };
        if created != SUCCESS {
            return Err(refused(format!("nvrtcCreateProgram answered {created}")));
        }
        // SAFETY: the program is alive, and there are as many options as is said.
        let compiled = unsafe { (self.compile)(program, pointers.len() as c_int, pointers.as_ptr()) };
        let result = if compiled == SUCCESS {
            // SAFETY: the program is alive and compiled.
            unsafe { fetch(program, self.code_size, self.code) }
                .ok_or_else(|| refused("the compiler gave no code".to_owned()))
        } else {
            // SAFETY: the program is alive.
            let log = unsafe { fetch(program, self.log_size, self.log) }.unwrap_or_default();
            let log = String::from_utf8_lossy(&log).trim_end_matches('\0').to_owned();
            Err(refused(format!("nvrtcCompileProgram answered {compiled}: {log}")))
        };
        // SAFETY: created once, destroyed once here.
        unsafe { (self.destroy)(&raw mut program) };
        result
    }
}

/// Bytes that a program has, by the call for their number and the call for themselves.
///
/// # Safety
/// The program is alive, and both calls belong together.
unsafe fn fetch(
    program: Program,
    size: unsafe extern "C" fn(Program, *mut usize) -> c_int,
    get: unsafe extern "C" fn(Program, *mut c_char) -> c_int,
) -> Option<Vec<u8>> {
    let mut n_bytes = 0;
    // SAFETY: the number goes to a local.
    if unsafe { size(program, &raw mut n_bytes) } != SUCCESS {
        return None;
    }
    let mut bytes = vec![0; n_bytes];
    // SAFETY: there is room for as many bytes as the compiler said.
    let got = unsafe { get(program, bytes.as_mut_ptr().cast()) };
    (got == SUCCESS).then_some(bytes)
}
