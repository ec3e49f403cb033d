//! Files that are read into memory of the device and written from there: NVIDIA's cuFile, loaded when it is asked for.
//!
//! Between a disk and a GPU that its driver knows, bytes go past memory of the host; elsewhere the library moves them through
//! buffers of its own ("compatibility mode").

use std::ffi::{c_int, c_void};
use std::os::fd::{AsRawFd, BorrowedFd};
use std::ptr;
use std::sync::OnceLock;

use libloading::Library;

use crate::error::{ModelError, Result};

/// Where the library is looked for: by name on the loader's path, then where toolkits are installed.
const LIBRARIES: [&str; 3] =
    ["libcufile.so.0", "/usr/local/cuda/lib64/libcufile.so.0", "/usr/lib/x86_64-linux-gnu/libcufile.so.0"];

/// The kind of a handle that is a descriptor of the operating system.
const OPAQUE_DESCRIPTOR: c_int = 1;

/// The setting that lets the library read where the GPU cannot be reached from the disk.
const ALLOW_COMPATIBILITY: c_int = 1;

/// What calls answer: 0 if all is well, and for one error that of the driver.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
struct Status {
    error: c_int,
    driver_error: c_int,
}

/// Names a file to the library.
#[repr(C)]
struct Descriptor {
    kind: c_int,
    file: DescriptorFile,
    operations: *const c_void,
}

#[repr(C)]
union DescriptorFile {
    descriptor: c_int,
    handle: *mut c_void,
}

/// The library, whose driver is open until the process ends.
#[derive(Debug)]
pub(in super::super) struct CuFile {
    register_file: unsafe extern "C" fn(*mut *mut c_void, *mut Descriptor) -> Status,
    deregister_file: unsafe extern "C" fn(*mut c_void),
    register_memory: unsafe extern "C" fn(*const c_void, usize, c_int) -> Status,
    deregister_memory: unsafe extern "C" fn(*const c_void) -> Status,
    read: unsafe extern "C" fn(*mut c_void, *mut c_void, usize, i64, i64) -> isize,
    write: unsafe extern "C" fn(*mut c_void, *const c_void, usize, i64, i64) -> isize,
    /// Keeps the calls.
    _library: Library,
}

/// A file that the library knows.
#[derive(Debug)]
pub(in super::super) struct FileHandle<'a> {
    library: &'static CuFile,
    handle: *mut c_void,
    file: BorrowedFd<'a>,
}

// SAFETY: the library's handles can be used by any thread of the process.
unsafe impl Send for FileHandle<'_> {}
// SAFETY: as above; reads and writes of several threads go side by side.
unsafe impl Sync for FileHandle<'_> {}

impl CuFile {
    /// The library, opened by the first who asks; the context of a device is current.
    ///
    /// # Errors
    /// If it is not there or does not start: the same for all who ask.
    pub(in super::super) fn get() -> Result<&'static Self> {
        static LIBRARY: OnceLock<std::result::Result<CuFile, String>> = OnceLock::new();
        let opened = LIBRARY.get_or_init(Self::open).as_ref();
        opened.map_err(|reason| ModelError::Device { call: "load cuFile", reason: reason.clone() })
    }

    fn open() -> std::result::Result<Self, String> {
        // SAFETY: opening the library runs its initializers, which is what it is opened for.
        let open = |name: &&str| unsafe { Library::new(*name) }.ok();
        let library = LIBRARIES
            .iter()
            .find_map(open)
            .ok_or_else(|| format!("the library was not found; looked for {}", LIBRARIES.join(", ")))?;
        let missing = |error: libloading::Error| error.to_string();
        // SAFETY: the types are those of the library's header, which have not changed since its first version.
        unsafe {
            // Versions before 1.14 do not have it, and take the setting from their file.
            if let Ok(set) =
                library.get::<unsafe extern "C" fn(c_int, bool) -> Status>(b"cuFileSetParameterBool")
            {
                set(ALLOW_COMPATIBILITY, true);
            }
            let start: unsafe extern "C" fn() -> Status =
                *library.get(b"cuFileDriverOpen").map_err(missing)?;
            start().check("cuFileDriverOpen").map_err(|error| error.to_string())?;
            Ok(Self {
                register_file: *library.get(b"cuFileHandleRegister").map_err(missing)?,
                deregister_file: *library.get(b"cuFileHandleDeregister").map_err(missing)?,
                register_memory: *library.get(b"cuFileBufRegister").map_err(missing)?,
                deregister_memory: *library.get(b"cuFileBufDeregister").map_err(missing)?,
                read: *library.get(b"cuFileRead").map_err(missing)?,
                write: *library.get(b"cuFileWrite").map_err(missing)?,
                _library: library,
            })
        }
    }

    /// Lets the library keep memory of the device mapped; without that it maps it for each call.
    ///
    /// # Safety
    /// The memory is the device's, and alive until [`Self::deregister_memory`].
    pub(in super::super) unsafe fn register_memory(&self, address: u64, n_bytes: usize) -> Result<()> {
        // SAFETY: the caller answers for the memory.
        unsafe { (self.register_memory)(pointer(address), n_bytes, 0) }.check("cuFileBufRegister")
    }

    /// Ends that.
    ///
    /// # Safety
    /// The memory was registered, and no call with it is under way.
    pub(in super::super) unsafe fn deregister_memory(&self, address: u64) {
        // SAFETY: the caller answers for the memory; what cannot be given back is the library's until the process ends.
        let _ = unsafe { (self.deregister_memory)(pointer(address)) };
    }

    /// Makes a file known. One descriptor has at most one handle at a time.
    pub(in super::super) fn handle<'a>(&'static self, file: BorrowedFd<'a>) -> Result<FileHandle<'a>> {
        let mut descriptor = Descriptor {
            kind: OPAQUE_DESCRIPTOR,
            file: DescriptorFile { handle: ptr::null_mut() },
            operations: ptr::null(),
        };
        descriptor.file.descriptor = file.as_raw_fd();
        let mut handle = ptr::null_mut();
        // SAFETY: the handle goes to a local, and the description is read before the call returns.
        unsafe { (self.register_file)(&raw mut handle, &raw mut descriptor) }
            .check("cuFileHandleRegister")?;
        Ok(FileHandle { library: self, handle, file })
    }
}

impl FileHandle<'_> {
    /// The descriptor of the file.
    pub(in super::super) fn descriptor(&self) -> c_int {
        self.file.as_raw_fd()
    }

    /// Reads exactly `n_bytes` from `offset` on to memory of the device; the device's context is current.
    ///
    /// # Safety
    /// The memory at `address` is the device's, as long as `n_bytes`, and used by nothing else until this returns.
    ///
    /// # Errors
    /// If the file ends before, or the library refuses.
    pub(in super::super) unsafe fn read(&self, address: u64, n_bytes: usize, offset: u64) -> Result<()> {
        check_moved("cuFileRead", n_bytes, offset, |offset| {
            // SAFETY: the file is open as long as this is, and the caller answers for the memory.
            unsafe { (self.library.read)(self.handle, pointer(address).cast_mut(), n_bytes, offset, 0) }
        })
    }

    /// Writes exactly `n_bytes` of the device's memory from `offset` on; the device's context is current.
    ///
    /// # Safety
    /// The memory at `address` is the device's, as long as `n_bytes`, and written by nothing else until this returns.
    ///
    /// # Errors
    /// If the file takes fewer, or the library refuses.
    pub(in super::super) unsafe fn write(&self, address: u64, n_bytes: usize, offset: u64) -> Result<()> {
        check_moved("cuFileWrite", n_bytes, offset, |offset| {
            // SAFETY: the file is open as long as this is, and the caller answers for the memory.
            unsafe { (self.library.write)(self.handle, pointer(address), n_bytes, offset, 0) }
        })
    }
}

impl Drop for FileHandle<'_> {
    fn drop(&mut self) {
        // SAFETY: registered once, given back once here; nothing is under way, because reads and writes borrow this.
        unsafe { (self.library.deregister_file)(self.handle) };
    }
}

impl Status {
    fn check(self, call: &'static str) -> Result<()> {
        match self {
            Self { error: 0, .. } => Ok(()),
            Self { error, driver_error } => Err(ModelError::Device {
                call,
                reason: format!("error {error}, of the driver {driver_error}"),
            }),
        }
    }
}

/// Makes a call that moves bytes from or to `offset` of a file; all of them or it has failed.
fn check_moved(
    call: &'static str,
    n_bytes: usize,
    offset: u64,
    do_move: impl FnOnce(i64) -> isize,
) -> Result<()> {
    let failed = |reason: String| Err(ModelError::Device { call, reason });
    let Ok(file_offset) = i64::try_from(offset) else { return failed(format!("offset {offset}")) };
    let n_moved = do_move(file_offset);
    match usize::try_from(n_moved) {
        Ok(n_moved) if n_moved == n_bytes => Ok(()),
        Ok(n_moved) => failed(format!("{n_moved} of {n_bytes} bytes at {offset}")),
        Err(_) if n_moved == -1 => failed(std::io::Error::last_os_error().to_string()),
        Err(_) => failed(format!("error {}", -n_moved)),
    }
}

fn pointer(address: u64) -> *const c_void {
    ptr::with_exposed_provenance(address as usize)
}
