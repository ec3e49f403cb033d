//! A kernel that copies many small pieces: the driver's copies cost half a microsecond each.

use std::ffi::c_void;
use std::ptr;

use cudarc::driver::sys;
use tracing::warn;

use super::call::{check, words_of};
use super::context::PrimaryContext;
use super::copy_piece::CopyPiece;
use crate::Result;

/// Threads of a block; with 16 bytes each they cover 4 KiB at a time, as the kernel says.
const BLOCK_THREADS: u32 = 256;

/// Blocks of a copy over the bus: enough bytes under way for it, and a quarter of a large GPU.
const N_BLOCKS: u32 = 32;

/// What addresses and lengths must be multiples of: a thread moves as much at a time.
pub(super) const ALIGNMENT: usize = 16;

/// Words of a piece, as the kernel reads them: target, source, bytes.
const PIECE_WORDS: usize = 3;

/// The kernel for any GPU since 2017; the driver compiles it when it is loaded.
const PTX: &str = concat!(include_str!("copy_kernel.ptx"), "\0");

/// The loaded kernel, with memory for its list of pieces.
#[derive(Debug)]
pub(super) struct CopyKernel {
    module: sys::CUmodule,
    function: sys::CUfunction,
    /// Host memory that the GPU reads: the list of the copy under way.
    list: *mut u64,
    n_list_pieces: usize,
}

// SAFETY: modules, functions and registered memory can be used by any thread once the context is current there.
unsafe impl Send for CopyKernel {}

impl CopyKernel {
    /// Loads the kernel; the context must be current.
    pub(super) fn load() -> Result<Self> {
        let mut module = ptr::null_mut();
        // SAFETY: the module goes to a local, and the text ends with a null byte.
        check("cuModuleLoadData", unsafe { sys::cuModuleLoadData(&raw mut module, PTX.as_ptr().cast()) })?;
        let mut function = ptr::null_mut();
        // SAFETY: the module was just loaded, and the name ends with a null byte.
        let found = check("cuModuleGetFunction", unsafe {
            sys::cuModuleGetFunction(&raw mut function, module, c"kvik_copy_pieces".as_ptr())
        });
        let kernel = Self { module, function, list: ptr::null_mut(), n_list_pieces: 0 };
        found.map(|()| kernel)
    }

    /// Queues a copy of all pieces in `stream`; the context must be current.
    ///
    /// # Safety
    /// Until the stream has ended, all bytes of all pieces are alive and used by nothing else, the GPU reaches all of them,
    /// and no other copy is queued. Addresses and lengths are multiples of [`ALIGNMENT`].
    pub(super) unsafe fn queue(&mut self, pieces: &[CopyPiece], stream: sys::CUstream) -> Result<()> {
        self.reserve(pieces.len())?;
        // SAFETY: the caller answers for the pieces, and the list has room for them.
        unsafe { self.launch(0, pieces.iter().copied(), N_BLOCKS, stream) }
    }

    /// Queues a copy of pieces whose place in the list is `first` and those behind it; the context must be current.
    ///
    /// # Safety
    /// As for [`Self::queue`], but other copies may be queued that have other places in the list. The list has room for the
    /// pieces ([`Self::reserve`]).
    pub(super) unsafe fn launch(
        &mut self,
        first: usize,
        pieces: impl Iterator<Item = CopyPiece>,
        n_blocks: u32,
        stream: sys::CUstream,
    ) -> Result<()> {
        // SAFETY: the caller says that the list has room.
        let mut list = unsafe { self.list.add(first * PIECE_WORDS) };
        let mut n_pieces: u32 = 0;
        for piece in pieces {
            let words = [piece.target, piece.source, piece.n_bytes as u64];
            // SAFETY: the list has room for all pieces, and no copy that reads these places is under way.
            unsafe {
                ptr::copy_nonoverlapping(
                    words.as_ptr(),
                    list.add(n_pieces as usize * PIECE_WORDS),
                    PIECE_WORDS,
                );
            };
            n_pieces += 1;
        }
        let mut arguments: [*mut c_void; 2] = [(&raw mut list).cast(), (&raw mut n_pieces).cast()];
        // SAFETY: the arguments are those of the kernel, and are read before the call returns. The caller answers for the
        // bytes.
        check("cuLaunchKernel", unsafe {
            sys::cuLaunchKernel(
                self.function,
                n_blocks.min(n_pieces.max(1)),
                1,
                1,
                BLOCK_THREADS,
                1,
                1,
                0,
                stream,
                arguments.as_mut_ptr(),
                ptr::null_mut(),
            )
        })
    }

    /// Makes room in the list, while no copy is under way; the context must be current.
    pub(super) fn reserve(&mut self, n_pieces: usize) -> Result<()> {
        if n_pieces <= self.n_list_pieces {
            return Ok(());
        }
        self.free_list();
        let n_pieces = n_pieces.next_power_of_two();
        let mut list = ptr::null_mut();
        let n_bytes = n_pieces * PIECE_WORDS * size_of::<u64>();
        // SAFETY: the address goes to a local.
        check("cuMemHostAlloc", unsafe {
            sys::cuMemHostAlloc(&raw mut list, n_bytes, sys::CU_MEMHOSTALLOC_PORTABLE)
        })?;
        (self.list, self.n_list_pieces) = (list.cast(), n_pieces);
        Ok(())
    }

    fn free_list(&mut self) {
        if self.list.is_null() {
            return;
        }
        // SAFETY: allocated once in `reserve`, freed once here, with no copy under way.
        let result = unsafe { sys::cuMemFreeHost(self.list.cast()) };
        (self.list, self.n_list_pieces) = (ptr::null_mut(), 0);
        if result != sys::CUresult::CUDA_SUCCESS {
            warn!(error = words_of(result), "could not free a list of pieces");
        }
    }

    /// Gives all of it back.
    pub(super) fn unload(&mut self, context: &PrimaryContext) {
        let Ok(_current) = context.enter() else { return };
        self.free_list();
        // SAFETY: loaded once, unloaded once, with no copy under way.
        let result = unsafe { sys::cuModuleUnload(self.module) };
        if result != sys::CUresult::CUDA_SUCCESS {
            warn!(error = words_of(result), "could not unload a kernel");
        }
    }
}
