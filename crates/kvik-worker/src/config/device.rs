//! The device that the model runs on, and its memory for keys and values.

use kvik_model::{
    BackendOptions, CpuBackendOptions, CudaBackendOptions, DeviceName, FileReads, KvSharing, KvSize,
    ModelError,
};
use kvik_types::Dtype;

use super::{WorkerConfig, check};
use crate::error::{Result, WorkerError};

/// Most blocks that can be asked for; block ids have 32 bits.
const MAX_KV_BLOCKS: usize = 1 << 30;

/// Blocks on the CPU where none are named.
const CPU_KV_BLOCKS: usize = 1024;

impl WorkerConfig {
    /// The backend that the settings name; `label` is what the worker calls itself among those that share its memory.
    ///
    /// # Errors
    /// If a setting is out of its range or has no meaning for the device.
    pub(crate) fn backend(&self, label: &str) -> Result<BackendOptions> {
        let device: DeviceName = self.device.parse().map_err(|_| WorkerError::InvalidConfig {
            field: "device",
            value: self.device.clone(),
            allowed: "cpu, or cuda:N with the index of a GPU",
        })?;
        let blocks = self.kv_blocks;
        check(blocks <= MAX_KV_BLOCKS, "kv_blocks", &blocks, "0 to 1073741824")?;
        match device {
            DeviceName::Cpu => {
                let without = "none with device cpu, whose KV has `kv_blocks`";
                check(self.kv_memory.is_none(), "kv_memory", "set", without)?;
                check(self.kernel_cache.is_none(), "kernel_cache", "set", "none with device cpu")?;
                let is_possible = self.file_reads()? != FileReads::On;
                check(is_possible, "store.gpu_direct", "on", "off or auto with device cpu")?;
                let mut options = CpuBackendOptions::default();
                options.n_blocks = if blocks == 0 { CPU_KV_BLOCKS } else { blocks };
                options.memory = self.memory.group(label.to_owned());
                options.kv_dtype = self.dtype(Dtype::F32)?;
                options.kv_sharing = self.sharing()?;
                if self.threads != 0 {
                    options.n_threads = self.threads;
                }
                Ok(BackendOptions::Cpu(options))
            }
            DeviceName::Cuda(ordinal) => {
                let mut options = CudaBackendOptions::default();
                options.ordinal = ordinal;
                if let Some(size) = self.kv_size()? {
                    options.kv_size = size;
                }
                options.memory = self.memory.group(label.to_owned());
                options.kv_dtype = self.dtype(Dtype::BF16)?;
                options.kv_sharing = self.sharing()?;
                options.kernel_cache.clone_from(&self.kernel_cache);
                options.file_reads = self.file_reads()?;
                Ok(BackendOptions::Cuda(options))
            }
        }
    }

    /// Whether the device reads chunks of its own store from files.
    fn file_reads(&self) -> Result<FileReads> {
        self.store.gpu_direct.parse().map_err(|_| WorkerError::InvalidConfig {
            field: "store.gpu_direct",
            value: self.store.gpu_direct.clone(),
            allowed: "off, auto or on",
        })
    }

    /// The memory of keys and values on a GPU; `None` for the default.
    fn kv_size(&self) -> Result<Option<KvSize>> {
        match (&self.kv_memory, self.kv_blocks) {
            (None, 0) => Ok(None),
            (None, n_blocks) => Ok(Some(KvSize::Blocks(n_blocks))),
            (Some(text), 0) => match text.parse() {
                Ok(size) => Ok(Some(size)),
                Err(ModelError::InvalidRequest { .. }) => Err(WorkerError::InvalidConfig {
                    field: "kv_memory",
                    value: text.clone(),
                    allowed: "a share of the device above 0 and at most 1, or a size such as 40GiB",
                }),
                Err(error) => Err(error.into()),
            },
            (Some(text), _) => {
                check(false, "kv_memory", text, "one of `kv_memory` and `kv_blocks`")?;
                Ok(None)
            }
        }
    }

    fn sharing(&self) -> Result<KvSharing> {
        self.kv_sharing.parse().map_err(|_| WorkerError::InvalidConfig {
            field: "kv_sharing",
            value: self.kv_sharing.clone(),
            allowed: "exact or dtype",
        })
    }

    fn dtype(&self, default: Dtype) -> Result<Dtype> {
        if self.kv_dtype == "auto" {
            return Ok(default);
        }
        match self.kv_dtype.parse() {
            Ok(dtype @ (Dtype::F32 | Dtype::F16 | Dtype::BF16)) => Ok(dtype),
            _ => Err(WorkerError::InvalidConfig {
                field: "kv_dtype",
                value: self.kv_dtype.clone(),
                allowed: "auto, f32, f16 or bf16",
            }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config(change: impl FnOnce(&mut WorkerConfig)) -> WorkerConfig {
        let mut config = WorkerConfig::default();
        change(&mut config);
        config
    }

    #[test]
    fn the_device_decides_the_defaults_of_its_memory() {
        let BackendOptions::Cpu(cpu) = WorkerConfig::default().backend("a").unwrap() else {
            panic!("not the CPU")
        };
        assert_eq!((cpu.n_blocks, cpu.kv_dtype), (1024, Dtype::F32));
        let on_gpu = config(|config| config.device = "cuda:3".into());
        let BackendOptions::Cuda(cuda) = on_gpu.backend("a").unwrap() else { panic!("not a GPU") };
        assert_eq!((cuda.ordinal, cuda.kv_size, cuda.kv_dtype), (3, KvSize::Share(0.9), Dtype::BF16));
    }

    #[test]
    fn settings_without_a_meaning_for_the_device_are_refused() {
        let message =
            |change: &dyn Fn(&mut WorkerConfig)| config(change).backend("a").unwrap_err().to_string();
        assert_eq!(
            message(&|config| config.kv_memory = Some("0.5".into())),
            "`kv_memory` is set; allowed: none with device cpu, whose KV has `kv_blocks`"
        );
        assert_eq!(
            message(&|config| config.device = "tpu".into()),
            "`device` is tpu; allowed: cpu, or cuda:N with the index of a GPU"
        );
        assert_eq!(
            message(&|config| config.store.gpu_direct = "on".into()),
            "`store.gpu_direct` is on; allowed: off or auto with device cpu"
        );
        assert_eq!(
            message(&|config| config.store.gpu_direct = "yes".into()),
            "`store.gpu_direct` is yes; allowed: off, auto or on"
        );
        let both = |config: &mut WorkerConfig| {
            config.device = "cuda:0".into();
            config.kv_blocks = 7;
            config.kv_memory = Some("1GiB".into());
        };
        assert_eq!(message(&both), "`kv_memory` is 1GiB; allowed: one of `kv_memory` and `kv_blocks`");
        let wrong = |config: &mut WorkerConfig| {
            config.device = "cuda:0".into();
            config.kv_memory = Some("much".into());
        };
        assert!(message(&wrong).starts_with("`kv_memory` is much; allowed: a share"), "{}", message(&wrong));
    }
}
