//! A model folder, opened.

use std::path::Path;
use std::sync::{Arc, OnceLock};

use kvik_tokens::Tokenizer;
use kvik_types::{Dtype, Namespace};
use serde::Deserialize;
use xxhash_rust::xxh3::xxh3_128;

use crate::blend::Selectors;
use crate::bundled;
use crate::checkpoint::Checkpoint;
use crate::config::ModelConfig;
use crate::engine::{Engine, EngineOptions};
use crate::error::{ModelError, Result};
use crate::forward::{Backend, CpuBackend, CpuBackendOptions, CudaBackend, CudaBackendOptions, KvSharing};

/// Largest `config.json` that is read, in bytes; real ones have a few kilobytes.
const MAX_CONFIG_BYTES: u64 = 16 << 20;

/// A model that is ready to be loaded into an engine.
#[derive(Debug)]
pub struct Model {
    name: String,
    config: ModelConfig,
    /// Hash of the text that `config` was read from.
    config_hash: u128,
    /// Hash of that and of the weights, computed on first use.
    revision: OnceLock<u128>,
    checkpoint: Checkpoint,
    tokenizer: Arc<Tokenizer>,
    /// What its settings say of segments.
    blend: Option<Selectors>,
    /// Seed of weights that are made on the device instead of being read.
    random_weights: Option<u64>,
}

/// The device that a model runs on, and how.
#[derive(Debug, Clone)]
pub enum BackendOptions {
    /// The processor's cores.
    Cpu(CpuBackendOptions),
    /// An NVIDIA GPU.
    Cuda(CudaBackendOptions),
}

/// What kvik reads of `config.json` for itself.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct KvikSettings {
    kvik: ModelSettings,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct ModelSettings {
    blend: Option<String>,
    random_weights: Option<u64>,
}

impl Model {
    /// Refuses a path that is no folder; what lies in a folder is not looked at.
    ///
    /// # Errors
    /// If it is missing or something else, or cannot be looked at.
    pub fn check_folder(folder: &Path) -> Result<()> {
        let what = match std::fs::metadata(folder) {
            Ok(metadata) if metadata.is_dir() => return Ok(()),
            Ok(_) => "not a folder",
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => "missing",
            Err(source) => return Err(ModelError::Io { path: folder.to_owned(), source }),
        };
        let allowed = "a folder with config.json, safetensors and tokenizer.json";
        Err(ModelError::request("model", format!("{}, which is {what}", folder.display()), allowed))
    }

    /// Opens a Hugging Face folder: `config.json`, safetensors and `tokenizer.json`.
    ///
    /// Weights are read when an engine is made, not here.
    ///
    /// # Errors
    /// If it is no folder, a file is missing or damaged, or the architecture is not supported.
    pub fn open(folder: &Path) -> Result<Self> {
        Self::check_folder(folder)?;
        let config_path = folder.join("config.json");
        let metadata = match std::fs::metadata(&config_path) {
            Ok(metadata) => metadata,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
                return Err(ModelError::MissingFile {
                    folder: folder.to_owned(),
                    what: "config.json".to_owned(),
                });
            }
            Err(source) => {
                return Err(ModelError::Io { path: config_path, source });
            }
        };
        if MAX_CONFIG_BYTES < metadata.len() {
            let value = format!("a file of {} bytes", metadata.len());
            return Err(ModelError::config("the whole", value, format!("at most {MAX_CONFIG_BYTES} bytes")));
        }
        let config = std::fs::read_to_string(&config_path)
            .map_err(|source| ModelError::Io { path: config_path, source })?;
        let name = folder
            .file_name()
            .map_or_else(|| folder.display().to_string(), |name| name.to_string_lossy().into());
        let model_config = ModelConfig::from_json(&config)?;
        let settings = settings_of(&config)?;
        let random_weights = settings.random_weights;
        let checkpoint =
            if random_weights.is_some() { Checkpoint::empty() } else { Checkpoint::open(folder)? };
        Ok(Self {
            name,
            config: model_config,
            blend: blend_setting(&settings)?,
            random_weights,
            config_hash: xxh3_128(config.as_bytes()),
            revision: OnceLock::new(),
            checkpoint,
            tokenizer: Arc::new(Tokenizer::open(folder)?),
        })
    }

    /// The model that the binary carries.
    ///
    /// # Errors
    /// None in a build that passed its tests.
    pub fn bundled() -> Result<Self> {
        Ok(Self {
            name: bundled::NAME.to_owned(),
            config: ModelConfig::from_json(bundled::CONFIG)?,
            blend: blend_setting(&settings_of(bundled::CONFIG)?)?,
            random_weights: None,
            config_hash: xxh3_128(bundled::CONFIG.as_bytes()),
            revision: OnceLock::new(),
            checkpoint: Checkpoint::from_bytes("model.safetensors", bundled::weights()?)?,
            tokenizer: Arc::new(Tokenizer::from_parts(
                &bundled::tokenizer()?,
                Some(bundled::TOKENIZER_CONFIG),
                None,
                Some(bundled::GENERATION_CONFIG),
            )?),
        })
    }

    /// Writes the model that the binary carries into `folder`, as [`Model::open`] reads it.
    ///
    /// # Errors
    /// If a file cannot be written.
    pub fn write_bundled(folder: &Path) -> Result<()> {
        let files: [(&str, &[u8]); 5] = [
            ("config.json", bundled::CONFIG.as_bytes()),
            ("generation_config.json", bundled::GENERATION_CONFIG),
            ("tokenizer.json", &bundled::tokenizer()?),
            ("tokenizer_config.json", bundled::TOKENIZER_CONFIG),
            ("model.safetensors", bundled::weights()?),
        ];
        write_files(folder, &files)
    }

    /// Writes a model without weights into `folder`: `config`, whose `kvik.random_weights` is a seed, and the tokenizer of the model
    /// that the binary carries.
    ///
    /// # Errors
    /// If the text is not the configuration of a model, or a file cannot be written.
    pub fn write_random(folder: &Path, config: &str) -> Result<()> {
        ModelConfig::from_json(config)?;
        if settings_of(config)?.random_weights.is_none() {
            return Err(ModelError::config("kvik.random_weights", "missing", "a seed"));
        }
        let files: [(&str, &[u8]); 4] = [
            ("config.json", config.as_bytes()),
            ("generation_config.json", bundled::GENERATION_CONFIG),
            ("tokenizer.json", &bundled::tokenizer()?),
            ("tokenizer_config.json", bundled::TOKENIZER_CONFIG),
        ];
        write_files(folder, &files)
    }

    /// Which tokens of segments are computed again, as the model's settings say: `kvik.blend` in its `config.json`. A model that
    /// was trained to read segments computed alone says `exact`, which is `none`.
    pub fn blend(&self) -> Option<&Selectors> {
        self.blend.as_ref()
    }

    /// The same model under another name, if there is one: the folder of a snapshot is named by a commit.
    #[must_use]
    pub fn with_name(self, name: Option<String>) -> Self {
        Self { name: name.unwrap_or(self.name), ..self }
    }

    /// The folder's name unless another one was given, or that of the bundled model.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The model's numbers.
    pub fn config(&self) -> &ModelConfig {
        &self.config
    }

    /// The model's weights.
    pub fn checkpoint(&self) -> &Checkpoint {
        &self.checkpoint
    }

    /// The model's tokenizer.
    pub fn tokenizer(&self) -> &Arc<Tokenizer> {
        &self.tokenizer
    }

    /// What KV that this model leaves on the CPU may be mixed with.
    ///
    /// A folder whose configuration or weights have changed is another model, whatever its name: KV that is
    /// kept somewhere outlives them. Reads all weights the first time.
    ///
    /// # Errors
    /// If the weights cannot be read.
    pub fn namespace(&self, kv_dtype: Dtype) -> Result<Namespace> {
        self.namespace_of(kv_dtype, CpuBackend::kv_layout_of(&self.config, kv_dtype, KvSharing::Exact))
    }

    fn namespace_of(&self, kv_dtype: Dtype, layout: String) -> Result<Namespace> {
        let revision = if let Some(revision) = self.revision.get() {
            *revision
        } else {
            let hashes = [self.config_hash.to_le_bytes(), self.checkpoint.fingerprint()?.to_le_bytes()];
            *self.revision.get_or_init(|| xxh3_128(hashes.as_flattened()))
        };
        Ok(Namespace {
            model: format!("{}@{revision:032x}", self.name),
            dtype: kv_dtype,
            layout,
            tenant: String::new(),
        })
    }

    /// Loads the weights into an engine.
    ///
    /// # Errors
    /// If the device cannot be used, the weights do not fit the configuration or the device, or an option is out of its range.
    pub fn engine(&self, backend: &BackendOptions, engine: EngineOptions) -> Result<Engine> {
        match backend {
            BackendOptions::Cpu(backend) => self.cpu_engine(backend, engine),
            BackendOptions::Cuda(backend) => self.cuda_engine(backend, engine),
        }
    }

    /// Loads the weights into an engine on the CPU.
    ///
    /// # Errors
    /// If the weights do not fit the configuration, or an option is out of its range.
    pub fn cpu_engine(&self, backend: &CpuBackendOptions, engine: EngineOptions) -> Result<Engine> {
        if self.random_weights.is_some() {
            let allowed = "a folder with weights; random ones are made on a GPU (--device cuda:0)";
            return Err(ModelError::config("kvik.random_weights", "set", allowed));
        }
        let loaded = CpuBackend::load(self.config.clone(), &self.checkpoint, backend)?;
        let namespace = self.namespace_of(backend.kv_dtype, loaded.kv_layout())?;
        Engine::new(Box::new(loaded), Some(Arc::clone(&self.tokenizer)), &namespace, engine)
    }

    /// Loads the weights into an engine on an NVIDIA GPU, with buffers for passes as large as the engine's.
    ///
    /// # Errors
    /// If the device cannot be used, the weights do not fit the configuration or the device, or an option is out of its range.
    pub fn cuda_engine(&self, backend: &CudaBackendOptions, engine: EngineOptions) -> Result<Engine> {
        let backend = CudaBackendOptions { max_rows: engine.max_batched_tokens, ..backend.clone() };
        let loaded = match self.random_weights {
            Some(seed) => CudaBackend::random(self.config.clone(), seed, &backend)?,
            None => CudaBackend::load(self.config.clone(), &self.checkpoint, &backend)?,
        };
        let namespace = self.namespace_of(backend.kv_dtype, loaded.kv_layout())?;
        Engine::new(Box::new(loaded), Some(Arc::clone(&self.tokenizer)), &namespace, engine)
    }
}

fn write_files(folder: &Path, files: &[(&str, &[u8])]) -> Result<()> {
    files.iter().try_for_each(|(name, bytes)| {
        let path = folder.join(name);
        std::fs::write(&path, bytes).map_err(|source| ModelError::Io { path, source })
    })
}

/// What `config.json` says to kvik.
fn settings_of(config: &str) -> Result<ModelSettings> {
    let settings: KvikSettings = serde_json::from_str(config).map_err(|error| {
        let allowed = "an object with `blend`, a string, and `random_weights`, a number";
        ModelError::config("kvik", error.to_string(), allowed)
    })?;
    Ok(settings.kvik)
}

/// The selectors that the settings of a model name.
fn blend_setting(settings: &ModelSettings) -> Result<Option<Selectors>> {
    match settings.blend.as_deref() {
        None => Ok(None),
        Some("exact") => Ok(Some(Selectors::default())),
        Some(selectors) => selectors.parse().map(Some).map_err(|_| {
            ModelError::config("kvik.blend", selectors, "`exact`, or a selector such as `first:16`")
        }),
    }
}
