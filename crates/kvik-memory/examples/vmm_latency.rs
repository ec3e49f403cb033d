//! Latencies of a device's virtual memory: `vmm_latency host` or `vmm_latency cuda`.
#![expect(clippy::print_stdout, reason = "printing is what it is for")]

use std::hint::black_box;
use std::sync::Arc;
use std::time::{Duration, Instant};

use cudarc::driver::sys;
use kvik_memory::geometry::UNIT_BYTES;
use kvik_memory::pages::{MapOutcome, PageMapper};
use kvik_memory::region::{Guard, Region};
use kvik_memory::vmm::cuda::CudaVmm;
use kvik_memory::vmm::host::{HostDevice, HostVmm};
use kvik_memory::vmm::{Access, Backdrop, Created, PhysicalHandle, VirtualRange, Vmm};
use kvik_memory::{Extent, Geometry, MemoryError, PageId, Result};

const N_WARM_UP: u64 = 16;
const N_ROUNDS: u64 = 256;

fn main() -> Result<()> {
    let backend = std::env::args().nth(1).unwrap_or_default();
    let vmm: Arc<dyn Vmm> = match backend.as_str() {
        "host" => {
            let device = HostDevice { total_bytes: 1 << 40, has_zeros_backdrop: true };
            Arc::new(HostVmm::open(device)?)
        }
        "cuda" => Arc::new(CudaVmm::open(0)?),
        _ => {
            return Err(MemoryError::Invalid {
                field: "backend",
                value: backend,
                allowed: "host or cuda".to_owned(),
            });
        }
    };
    println!("device {}, granularity {} bytes", vmm.device_name(), vmm.granularity_bytes());
    println!("map of a part of a handle: {}", allowed(map_part(&*vmm)));
    println!("read-only access: {}", allowed(set_read_only(&*vmm)));

    println!("\none call at a time, microseconds, p50 / p99 of {N_ROUNDS}");
    println!(
        "{:>8} {:>17} {:>17} {:>17} {:>17} {:>17}",
        "MiB", "create", "map", "access", "unmap", "release"
    );
    for n_units in [1, 8, 32] {
        print_single_calls(&*vmm, n_units * UNIT_BYTES)?;
    }

    println!("\none call over a run of {N_ROUNDS} mappings, microseconds a mapping");
    println!("{:>8} {:>17} {:>17}", "MiB", "access", "unmap");
    for n_units in [1, 8, 32] {
        print_runs(&*vmm, n_units * UNIT_BYTES)?;
    }

    println!("\nregion of 64 GiB, milliseconds");
    println!(
        "{:>8} {:>10} {:>10} {:>10} {:>10} {:>10}",
        "buffers", "guard", "open", "map 512M", "unmap", "close"
    );
    for n_buffers in [1, 64] {
        for guard in [Guard::Zero, Guard::None] {
            print_region(&vmm, n_buffers, guard)?;
        }
    }
    if backend == "cuda" {
        // Last: a fault leaves the device unusable for this process.
        println!("\nwrite to read-only memory: {}", write_to_read_only(&*vmm)?);
    }
    Ok(())
}

fn print_single_calls(vmm: &dyn Vmm, n_bytes: u64) -> Result<()> {
    let range = vmm.reserve(n_bytes, Backdrop::Nothing)?;
    let mut times: [Vec<Duration>; 5] = Default::default();
    for round in 0..N_WARM_UP + N_ROUNDS {
        let mut measured = [Duration::ZERO; 5];
        let handle = timed(&mut measured[0], || create(vmm, n_bytes))?;
        timed(&mut measured[1], || vmm.map(range, handle))?;
        timed(&mut measured[2], || vmm.set_access(range, Access::ReadWrite))?;
        vmm.write(range.address, &[1])?;
        timed(&mut measured[3], || vmm.unmap(range))?;
        timed(&mut measured[4], || vmm.release(handle))?;
        if round >= N_WARM_UP {
            for (times, measured) in times.iter_mut().zip(measured) {
                times.push(measured);
            }
        }
    }
    vmm.free_reservation(range)?;
    print!("{:>8}", n_bytes >> 20);
    for times in &mut times {
        times.sort_unstable();
        let micros = |percent: usize| times[times.len() * percent / 100].as_secs_f64() * 1e6;
        print!(" {:>8.2} /{:>7.2}", micros(50), micros(99));
    }
    println!();
    Ok(())
}

fn print_runs(vmm: &dyn Vmm, n_bytes: u64) -> Result<()> {
    let range = vmm.reserve(n_bytes * N_ROUNDS, Backdrop::Nothing)?;
    let mut handles = Vec::new();
    for idx in 0..N_ROUNDS {
        let handle = create(vmm, n_bytes)?;
        vmm.map(VirtualRange { address: range.address + idx * n_bytes, n_bytes }, handle)?;
        handles.push(handle);
    }
    let (mut access, mut unmap) = (Duration::ZERO, Duration::ZERO);
    timed(&mut access, || vmm.set_access(range, Access::ReadWrite))?;
    timed(&mut unmap, || vmm.unmap(range))?;
    for handle in handles {
        vmm.release(handle)?;
    }
    vmm.free_reservation(range)?;
    let each = |duration: Duration| duration.as_secs_f64() * 1e6 / N_ROUNDS as f64;
    println!("{:>8} {:>17.2} {:>17.2}", n_bytes >> 20, each(access), each(unmap));
    Ok(())
}

fn print_region(vmm: &Arc<dyn Vmm>, n_buffers: u32, guard: Guard) -> Result<()> {
    let capacity_pages = (64_u64 << 30) / UNIT_BYTES / u64::from(n_buffers);
    let geometry = Geometry::try_new(n_buffers, UNIT_BYTES, capacity_pages as u32)?;
    // 512 MiB in all: 256 pages of one buffer, or 4 pages of each of 64.
    let n_extent_pages = (256 / n_buffers).min(32);
    let extents: Vec<Extent> = (0..256 / n_buffers / n_extent_pages)
        .map(|idx| Extent::try_new(PageId(idx * n_extent_pages), n_extent_pages))
        .collect::<Result<_>>()?;
    let mut times = [Duration::ZERO; 4];
    let region = timed(&mut times[0], || Region::try_new(Arc::clone(vmm), geometry, guard))?;
    // The second round is what counts: the first one cuts the guard's pieces.
    for _ in 0..2 {
        match timed(&mut times[1], || Ok(region.map(&extents)))? {
            MapOutcome::Mapped => {}
            MapOutcome::NoMemory => return Err(no_memory()),
            MapOutcome::Failed { error, .. } => return Err(error),
        }
        black_box(timed(&mut times[2], || Ok(region.unmap(&extents)))?);
    }
    let guard = region.guard();
    timed(&mut times[3], || {
        drop(region);
        Ok(())
    })?;
    let [open, map, unmap, close] = times.map(|time| time.as_secs_f64() * 1e3);
    println!(
        "{n_buffers:>8} {:>10} {open:>10.2} {map:>10.2} {unmap:>10.2} {close:>10.2}",
        format!("{guard:?}")
    );
    Ok(())
}

fn map_part(vmm: &dyn Vmm) -> Result<()> {
    let range = vmm.reserve(UNIT_BYTES, Backdrop::Nothing)?;
    let handle = create(vmm, 2 * UNIT_BYTES)?;
    let mapped = vmm.map(range, handle);
    if mapped.is_ok() {
        vmm.unmap(range)?;
    }
    vmm.release(handle)?;
    vmm.free_reservation(range)?;
    mapped
}

fn set_read_only(vmm: &dyn Vmm) -> Result<()> {
    let range = vmm.reserve(UNIT_BYTES, Backdrop::Nothing)?;
    let handle = create(vmm, UNIT_BYTES)?;
    vmm.map(range, handle)?;
    let is_allowed = vmm.set_access(range, Access::ReadOnly);
    vmm.unmap(range)?;
    vmm.release(handle)?;
    vmm.free_reservation(range)?;
    is_allowed
}

/// What the device itself, without the checks before it, answers to a write.
fn write_to_read_only(vmm: &dyn Vmm) -> Result<String> {
    let range = vmm.reserve(UNIT_BYTES, Backdrop::Nothing)?;
    vmm.map(range, create(vmm, UNIT_BYTES)?)?;
    vmm.set_access(range, Access::ReadWrite)?;
    vmm.fill(range, 0)?;
    vmm.set_access(range, Access::ReadOnly)?;
    // SAFETY: the range is mapped; whether the device refuses to write is the question. The primary
    // context is made current and nothing is in flight.
    let (filled, synchronized) = unsafe {
        let mut context = std::ptr::null_mut();
        let _ = sys::cuDevicePrimaryCtxRetain(&raw mut context, 0);
        let _ = sys::cuCtxSetCurrent(context);
        (sys::cuMemsetD8_v2(range.address, 1, UNIT_BYTES as usize), sys::cuCtxSynchronize())
    };
    let mut byte = [0];
    let read = vmm.read(range.address, &mut byte).map(|()| byte[0]);
    Ok(format!("fill {filled:?}, then {synchronized:?}, then read {read:?}"))
}

fn allowed(result: Result<()>) -> String {
    result.map_or_else(|error| format!("refused: {error}"), |()| "allowed".to_owned())
}

fn create(vmm: &dyn Vmm, n_bytes: u64) -> Result<PhysicalHandle> {
    match vmm.create(n_bytes)? {
        Created::Memory(handle) => Ok(handle),
        Created::NoMemory => Err(no_memory()),
    }
}

fn no_memory() -> MemoryError {
    MemoryError::Device { call: "create", reason: "the device has no memory left".to_owned() }
}

fn timed<T>(duration: &mut Duration, work: impl FnOnce() -> Result<T>) -> Result<T> {
    let started = Instant::now();
    let result = work();
    *duration = started.elapsed();
    result
}
