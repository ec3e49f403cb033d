//! Fills memory with a pattern and finds words that differ: loops on the host, kernels on a GPU.

use std::ffi::{CStr, CString, c_void};
use std::ptr;

use cudarc::driver::sys;

use super::{Answer, Backend};

const PTX: &str = include_str!("pattern.ptx");
/// As in the kernels.
const FACTOR: u64 = 0x1E37_79B9_7F4A_7C15;
const N_THREADS: u32 = 256;
const MAX_THREAD_BLOCKS: u64 = 512;

/// What writes and checks patterns.
#[derive(Debug)]
pub(crate) enum Painter {
    Host,
    Cuda(Kernels),
}

/// The kernels on a GPU, and the counter of words that differ.
#[derive(Debug)]
pub(crate) struct Kernels {
    fill: sys::CUfunction,
    check: sys::CUfunction,
    counter: sys::CUdeviceptr,
}

impl Painter {
    pub(crate) fn open(backend: Backend) -> Answer<Self> {
        match backend {
            Backend::Host => Ok(Self::Host),
            Backend::Cuda => Kernels::load().map(Self::Cuda),
        }
    }

    /// Writes the pattern of `seed` to `n_bytes` from `address` on, sooner or later.
    ///
    /// The caller has this memory mapped for writing, and keeps it so until [`finish`](Self::finish).
    pub(crate) fn fill(&self, address: u64, n_bytes: u64, seed: u64) -> Answer<()> {
        match self {
            Self::Host => {
                for (idx, word) in words_at(address, n_bytes).iter_mut().enumerate() {
                    *word = word_of(idx as u64, seed);
                }
                Ok(())
            }
            Self::Cuda(kernels) => kernels.launch_fill(address, n_bytes / 8, seed),
        }
    }

    /// Adds the words that are not the pattern's to `n_different` on the host, to the counter on a GPU.
    pub(crate) fn check(&self, address: u64, n_bytes: u64, seed: u64, n_different: &mut u64) -> Answer<()> {
        match self {
            Self::Host => {
                let words = words_at(address, n_bytes).iter().enumerate();
                *n_different +=
                    words.filter(|(idx, word)| **word != word_of(*idx as u64, seed)).count() as u64;
                Ok(())
            }
            Self::Cuda(kernels) => kernels.launch_check(address, n_bytes / 8, seed),
        }
    }

    /// Waits for what was started; the words that differed since the last call.
    pub(crate) fn finish(&self, n_different: u64) -> Answer<u64> {
        match self {
            Self::Host => Ok(n_different),
            Self::Cuda(kernels) => kernels.take_counter(),
        }
    }
}

fn word_of(idx: u64, seed: u64) -> u64 {
    idx.wrapping_add(seed).wrapping_mul(FACTOR) ^ seed
}

/// Memory of this process.
fn words_at<'a>(address: u64, n_bytes: u64) -> &'a mut [u64] {
    // SAFETY: the caller of `fill` and `check` has the range mapped for writing, pages are aligned, and this
    // process has one thread that touches them, one range at a time.
    unsafe {
        std::slice::from_raw_parts_mut(
            ptr::with_exposed_provenance_mut(address as usize),
            n_bytes as usize / 8,
        )
    }
}

impl Kernels {
    /// Loads the kernels into the primary context of device 0, which stays current on this thread.
    fn load() -> Answer<Self> {
        let text = CString::new(PTX)?;
        let (mut context, mut module) = (ptr::null_mut(), ptr::null_mut());
        let mut counter = 0;
        // SAFETY: what the calls return goes to locals; the text ends with a null byte. The context and the
        // module live as long as the process.
        unsafe {
            checked("cuDevicePrimaryCtxRetain", sys::cuDevicePrimaryCtxRetain(&raw mut context, 0))?;
            checked("cuCtxSetCurrent", sys::cuCtxSetCurrent(context))?;
            checked("cuModuleLoadData", sys::cuModuleLoadData(&raw mut module, text.as_ptr().cast()))?;
            checked("cuMemAlloc", sys::cuMemAlloc_v2(&raw mut counter, 8))?;
            checked("cuMemsetD8", sys::cuMemsetD8_v2(counter, 0, 8))?;
        }
        let function = |name: &CStr| {
            let mut function = ptr::null_mut();
            // SAFETY: the module is loaded, the name ends with a null byte, and the function goes to a local.
            let result = unsafe { sys::cuModuleGetFunction(&raw mut function, module, name.as_ptr()) };
            checked("cuModuleGetFunction", result).map(|()| function)
        };
        Ok(Self { fill: function(c"fill")?, check: function(c"check")?, counter })
    }

    fn launch_fill(&self, address: u64, n_words: u64, seed: u64) -> Answer<()> {
        launch(self.fill, n_words, &mut [address, n_words, seed])
    }

    fn launch_check(&self, address: u64, n_words: u64, seed: u64) -> Answer<()> {
        launch(self.check, n_words, &mut [address, n_words, seed, self.counter])
    }

    fn take_counter(&self) -> Answer<u64> {
        let mut bytes = [0_u8; 8];
        // SAFETY: the counter is 8 bytes of the device, and so are the bytes here.
        unsafe {
            checked("cuCtxSynchronize", sys::cuCtxSynchronize())?;
            checked(
                "cuMemcpyDtoH",
                sys::cuMemcpyDtoH_v2(bytes.as_mut_ptr().cast::<c_void>(), self.counter, bytes.len()),
            )?;
            checked("cuMemsetD8", sys::cuMemsetD8_v2(self.counter, 0, bytes.len()))?;
            checked("cuCtxSynchronize", sys::cuCtxSynchronize())?;
        }
        Ok(u64::from_le_bytes(bytes))
    }
}

/// Starts a kernel whose parameters are words.
fn launch(function: sys::CUfunction, n_words: u64, words: &mut [u64]) -> Answer<()> {
    let n_thread_blocks = n_words.div_ceil(N_THREADS.into()).clamp(1, MAX_THREAD_BLOCKS) as u32;
    let mut parameters: Vec<*mut c_void> =
        words.iter_mut().map(|word| ptr::from_mut(word).cast::<c_void>()).collect();
    // SAFETY: the function is of a module that stays loaded, and takes as many words as it is given; the
    // driver copies them before the call returns. The default stream keeps the order of the calls.
    let result = unsafe {
        sys::cuLaunchKernel(
            function,
            n_thread_blocks,
            1,
            1,
            N_THREADS,
            1,
            1,
            0,
            ptr::null_mut(),
            parameters.as_mut_ptr(),
            ptr::null_mut(),
        )
    };
    checked("cuLaunchKernel", result)
}

fn checked(call: &str, result: sys::CUresult) -> Answer<()> {
    match result {
        sys::CUresult::CUDA_SUCCESS => Ok(()),
        error => Err(format!("{call}: {error:?}").into()),
    }
}
