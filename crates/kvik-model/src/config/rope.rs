//! Rotary position encoding: base, scaling and the inverse frequencies they give.

use std::f64::consts::PI;

use serde_json::{Map, Value};

use super::fields::Fields;
use crate::error::Result;

/// Base where `config.json` gives none.
const DEFAULT_THETA: f64 = 10_000.0;

/// Rotary position encoding of queries and keys, in the half-rotation form.
#[derive(Debug, Clone, PartialEq)]
pub struct RopeConfig {
    /// Base of the geometric series of wavelengths.
    pub theta: f64,
    /// How the wavelengths are stretched for contexts longer than the training one.
    pub scaling: RopeScaling,
}

/// How the wavelengths are stretched.
#[derive(Debug, Clone, PartialEq)]
pub enum RopeScaling {
    /// Not at all.
    None,
    /// Every frequency divided by `factor`.
    Linear {
        /// The divisor.
        factor: f64,
    },
    /// Low frequencies divided by `factor`, high ones kept, a ramp between.
    Llama3 {
        /// The divisor of the low frequencies.
        factor: f64,
        /// Wavelengths above `original_max_positions / low_freq_factor` are divided.
        low_freq_factor: f64,
        /// Wavelengths below `original_max_positions / high_freq_factor` are kept.
        high_freq_factor: f64,
        /// The context of the training before stretching, in tokens.
        original_max_positions: f64,
    },
}

impl RopeConfig {
    /// Reads `rope_parameters`, or `rope_theta` with `rope_scaling` as older files have it.
    pub(super) fn read(fields: Fields<'_>, max_positions: usize) -> Result<Self> {
        reject_partial_rotation(fields)?;
        let no_parameters = Map::new();
        let parameters = read_object(fields, "rope_scaling", "rope_scaling.")?
            .or(read_object(fields, "rope_parameters", "rope_parameters.")?)
            .unwrap_or(Fields::new(&no_parameters, "rope_parameters."));
        reject_partial_rotation(parameters)?;
        if let Some((name, value)) = parameters.iter().find(|(_, value)| value.is_object()) {
            return Err(parameters.invalid(name, value, "the same parameters for all layers"));
        }
        let theta = match read_theta(parameters)? {
            Some(theta) => theta,
            None => read_theta(fields)?.unwrap_or(DEFAULT_THETA),
        };
        Ok(Self { theta, scaling: RopeScaling::read(fields, parameters, max_positions)? })
    }

    /// Returns the angle, in radians, that each of the `head_dim / 2` pairs turns per position.
    ///
    /// Every step rounds to `f32` where the reference implementation does, because an error of
    /// a frequency grows with the position it is multiplied by.
    pub fn inverse_frequencies(&self, head_dim: usize) -> Vec<f32> {
        let theta = f64::from(self.theta as f32);
        (0..head_dim / 2)
            .map(|pair_idx| {
                let exponent = (2 * pair_idx) as f32 / head_dim as f32;
                let frequency = 1.0 / theta.powf(f64::from(exponent)) as f32;
                self.scaling.apply(frequency)
            })
            .collect()
    }
}

impl RopeScaling {
    fn read(fields: Fields<'_>, parameters: Fields<'_>, max_positions: usize) -> Result<Self> {
        let (name, rope_type) = match parameters.text("rope_type")? {
            Some(rope_type) => ("rope_type", rope_type),
            None => ("type", parameters.text("type")?.unwrap_or("default")),
        };
        match rope_type {
            "default" => Ok(Self::None),
            "linear" => Ok(Self::Linear { factor: read_number(parameters, "factor", 1.0)? }),
            "llama3" => {
                let low_freq_factor =
                    read_number(parameters, "low_freq_factor", f64::from(f32::MIN_POSITIVE))?;
                let high_freq_factor =
                    read_number(parameters, "high_freq_factor", f64::from(f32::MIN_POSITIVE))?;
                if high_freq_factor as f32 <= low_freq_factor as f32 {
                    let allowed = format!("more than low_freq_factor, which is {low_freq_factor}");
                    return Err(parameters.invalid(
                        "high_freq_factor",
                        &Value::from(high_freq_factor),
                        allowed,
                    ));
                }
                let original_name = "original_max_position_embeddings";
                let original_max_positions = match fields.optional_number(original_name, 1.0)? {
                    Some(positions) => positions,
                    None => parameters.optional_number(original_name, 1.0)?.unwrap_or(max_positions as f64),
                };
                Ok(Self::Llama3 {
                    factor: read_number(parameters, "factor", 1.0)?,
                    low_freq_factor,
                    high_freq_factor,
                    original_max_positions,
                })
            }
            other => Err(parameters.invalid(name, &Value::from(other), "default, linear or llama3")),
        }
    }

    fn apply(&self, frequency: f32) -> f32 {
        match *self {
            Self::None => frequency,
            Self::Linear { factor } => frequency / factor as f32,
            Self::Llama3 { factor, low_freq_factor, high_freq_factor, original_max_positions } => {
                // The reference divides by a tensor as it multiplies with the reciprocal.
                let wavelength = (1.0 / frequency) * (2.0 * PI) as f32;
                if wavelength > (original_max_positions / low_freq_factor) as f32 {
                    return frequency / factor as f32;
                }
                if wavelength < (original_max_positions / high_freq_factor) as f32 {
                    return frequency;
                }
                let kept_share = ((1.0 / wavelength) * original_max_positions as f32
                    - low_freq_factor as f32)
                    / (high_freq_factor - low_freq_factor) as f32;
                (1.0 - kept_share) * frequency / factor as f32 + kept_share * frequency
            }
        }
    }
}

/// Returns the object under `name`, with an empty one read as missing.
fn read_object<'a>(fields: Fields<'a>, name: &str, path: &'static str) -> Result<Option<Fields<'a>>> {
    match fields.get(name) {
        None => Ok(None),
        Some(Value::Object(map)) => Ok((!map.is_empty()).then(|| Fields::new(map, path))),
        Some(value) => Err(fields.invalid(name, value, "an object or null")),
    }
}

fn read_theta(fields: Fields<'_>) -> Result<Option<f64>> {
    // A base of 1 or less gives frequencies that grow or stand still; no model has one.
    fields.optional_number("rope_theta", 1.0)
}

fn read_number(fields: Fields<'_>, name: &str, min: f64) -> Result<f64> {
    fields
        .optional_number(name, min)?
        .ok_or_else(|| fields.missing(name, format!("a number of at least {min}")))
}

fn reject_partial_rotation(fields: Fields<'_>) -> Result<()> {
    match fields.get("partial_rotary_factor") {
        Some(value) if value.as_f64() != Some(1.0) => {
            Err(fields.invalid("partial_rotary_factor", value, "1"))
        }
        _ => Ok(()),
    }
}
