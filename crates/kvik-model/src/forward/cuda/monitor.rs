//! What a GPU is doing, by the driver's management library (NVML).
//!
//! The library comes with the driver and is loaded when a monitor is opened. Without it there is no monitor, and nothing else
//! of the process is affected.

use std::ffi::{CStr, CString, c_char, c_int, c_uint, c_void};
use std::ptr;

use cudarc::driver::sys;
use libloading::Library;
use tracing::debug;

/// Where the library is looked for.
const LIBRARIES: [&str; 2] = ["libnvidia-ml.so.1", "libnvidia-ml.so"];

/// Bytes of the longest name of a device on its bus, with the null byte at its end.
const BUS_ID_BYTES: usize = 32;

/// The library's answer to a call that went well.
const SUCCESS: c_int = 0;

type Handle = *mut c_void;

/// What a GPU has of memory and how busy it is.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct DeviceUsage {
    /// Memory in use by all processes, and all that there is, in bytes.
    pub memory_bytes: Option<(u64, u64)>,
    /// Share of the last moments in which some kernel ran, 0 to 1; of all processes.
    pub busy: Option<f64>,
}

/// Watches a GPU.
#[derive(Debug)]
pub struct DeviceMonitor {
    calls: Calls,
    device: Handle,
}

/// As the library writes it.
#[repr(C)]
#[derive(Default)]
struct RawMemory {
    total: u64,
    free: u64,
    used: u64,
}

/// As the library writes it, in percent.
#[repr(C)]
#[derive(Default)]
struct RawUtilization {
    gpu: c_uint,
    memory: c_uint,
}

/// The library's calls that are used, between its start and its end.
#[derive(Debug)]
struct Calls {
    device_by_bus_id: unsafe extern "C" fn(*const c_char, *mut Handle) -> c_int,
    memory: unsafe extern "C" fn(Handle, *mut RawMemory) -> c_int,
    utilization: unsafe extern "C" fn(Handle, *mut RawUtilization) -> c_int,
    shutdown: unsafe extern "C" fn() -> c_int,
    /// Keeps the calls.
    _library: Library,
}

// SAFETY: the library's calls may come from any thread; a handle names a device and belongs to no thread.
unsafe impl Send for DeviceMonitor {}
// SAFETY: as above; the fields are never written to.
unsafe impl Sync for DeviceMonitor {}

impl DeviceMonitor {
    /// Watches the GPU with this index among those that the process can see; `None` where the library or the device is missing.
    pub fn open(ordinal: u32) -> Option<Self> {
        let opened = bus_id(ordinal).and_then(|bus_id| {
            Self::open_with(LIBRARIES[0], &bus_id).or_else(|_| Self::open_with(LIBRARIES[1], &bus_id))
        });
        opened.inspect_err(|reason| debug!(ordinal, reason, "the device has no metrics")).ok()
    }

    /// Memory and work of the device now; what the device does not tell is missing.
    pub fn read(&self) -> DeviceUsage {
        let (mut memory, mut utilization) = (RawMemory::default(), RawUtilization::default());
        // SAFETY: the handle is one of a device, and the values go to locals of the library's types.
        let has_memory = unsafe { (self.calls.memory)(self.device, &raw mut memory) } == SUCCESS;
        // SAFETY: as above.
        let is_told = unsafe { (self.calls.utilization)(self.device, &raw mut utilization) } == SUCCESS;
        DeviceUsage {
            memory_bytes: has_memory.then_some((memory.used, memory.total)),
            busy: is_told.then(|| f64::from(utilization.gpu.min(100)) / 100.0),
        }
    }

    fn open_with(library: &str, bus_id: &CStr) -> Result<Self, String> {
        let calls = Calls::load(library)?;
        let mut device = ptr::null_mut();
        // SAFETY: the text ends with a null byte, and the handle goes to a local.
        match unsafe { (calls.device_by_bus_id)(bus_id.as_ptr(), &raw mut device) } {
            SUCCESS => Ok(Self { calls, device }),
            error => Err(format!("nvmlDeviceGetHandleByPciBusId_v2 gave {error}")),
        }
    }
}

impl Calls {
    fn load(name: &str) -> Result<Self, String> {
        let failed = |error: libloading::Error| error.to_string();
        // SAFETY: opening the library runs its initializers, which is what it is opened for.
        let library = unsafe { Library::new(name) }.map_err(failed)?;
        // SAFETY: the types of the functions are those of the library's header, the same in all its versions since 2012; they
        // are called only while the library is open.
        let (start, device_by_bus_id, memory, utilization, shutdown) = unsafe {
            let start = *library.get::<unsafe extern "C" fn() -> c_int>(b"nvmlInit_v2\0").map_err(failed)?;
            let device_by_bus_id = *library.get(b"nvmlDeviceGetHandleByPciBusId_v2\0").map_err(failed)?;
            let memory = *library.get(b"nvmlDeviceGetMemoryInfo\0").map_err(failed)?;
            let utilization = *library.get(b"nvmlDeviceGetUtilizationRates\0").map_err(failed)?;
            let shutdown = *library.get(b"nvmlShutdown\0").map_err(failed)?;
            (start, device_by_bus_id, memory, utilization, shutdown)
        };
        // SAFETY: it takes nothing, and is counted: every start has one end.
        match unsafe { start() } {
            SUCCESS => Ok(Self { device_by_bus_id, memory, utilization, shutdown, _library: library }),
            error => Err(format!("nvmlInit_v2 gave {error}")),
        }
    }
}

impl Drop for Calls {
    fn drop(&mut self) {
        // SAFETY: started once in `load`.
        let result = unsafe { (self.shutdown)() };
        if result != SUCCESS {
            debug!(result, "could not end the management library");
        }
    }
}

/// The name of a device on its bus, by which both libraries know it: their indices may differ.
fn bus_id(ordinal: u32) -> Result<CString, String> {
    // SAFETY: looking for the library runs its initializers, which is what opening it is for.
    if !unsafe { sys::is_culib_present() } {
        return Err("libcuda.so.1 was not found".to_owned());
    }
    let checked = |result| match result {
        sys::CUresult::CUDA_SUCCESS => Ok(()),
        error => Err(format!("{error:?}")),
    };
    let index = c_int::try_from(ordinal).map_err(|_| "there is no such device".to_owned())?;
    let mut device = 0;
    let mut name = [0; BUS_ID_BYTES];
    // SAFETY: 0 is the only value that is allowed.
    checked(unsafe { sys::cuInit(0) })?;
    // SAFETY: the device goes to a local.
    checked(unsafe { sys::cuDeviceGet(&raw mut device, index) })?;
    // SAFETY: the name goes to a local of the length that is told.
    checked(unsafe { sys::cuDeviceGetPCIBusId(name.as_mut_ptr(), BUS_ID_BYTES as c_int, device) })?;
    let name = name.map(|byte| byte as u8);
    CStr::from_bytes_until_nul(&name).map(CStr::to_owned).map_err(|error| error.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A library with one device that has used 3 of 8 bytes and is busy for a quarter of the time.
    const LIBRARY: &str = r#"
        #include <string.h>
        int nvmlInit_v2(void) { return 0; }
        int nvmlShutdown(void) { return 0; }
        int nvmlDeviceGetHandleByPciBusId_v2(const char *id, void **device) {
            *device = (void *) 1;
            return strcmp(id, "0000:01:00.0") == 0 ? 0 : 6;
        }
        int nvmlDeviceGetMemoryInfo(void *device, unsigned long long *memory) {
            memory[0] = 8; memory[1] = 5; memory[2] = 3;
            return 0;
        }
        int nvmlDeviceGetUtilizationRates(void *device, unsigned *rates) {
            rates[0] = 25; rates[1] = 7;
            return 0;
        }
    "#;

    #[test]
    fn a_device_is_found_by_its_bus_and_tells_its_memory_and_work() {
        let folder = tempfile::tempdir().unwrap();
        let (source, library) = (folder.path().join("nvml.c"), folder.path().join("libnvml.so"));
        std::fs::write(&source, LIBRARY).unwrap();
        let compiled = std::process::Command::new("cc")
            .args(["-shared", "-fPIC", "-o"])
            .args([&library, &source])
            .status();
        assert!(compiled.unwrap().success());
        let library = library.to_str().unwrap();
        let monitor = DeviceMonitor::open_with(library, c"0000:01:00.0").unwrap();
        assert_eq!(monitor.read(), DeviceUsage { memory_bytes: Some((3, 8)), busy: Some(0.25) });
        assert!(DeviceMonitor::open_with(library, c"0000:02:00.0").unwrap_err().contains("gave 6"));
    }

    #[test]
    fn without_the_library_there_is_no_monitor() {
        assert!(DeviceMonitor::open_with("libdoes-not-exist.so.1", c"0000:01:00.0").is_err());
    }
}
