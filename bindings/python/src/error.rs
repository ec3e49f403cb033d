//! The errors of the crates below as Python's exceptions, by what the caller can do.

use kvik_memory::MemoryError;
use kvik_node::NodeError;
use kvik_types::TypesError;
use pyo3::create_exception;
use pyo3::exceptions::PyException;
use pyo3::prelude::*;

create_exception!(kvik, KvikError, PyException, "Something that kvik could not do.");
create_exception!(kvik, InvalidValueError, KvikError, "A value that is not allowed: correct it.");
create_exception!(
    kvik,
    StoreGoneError,
    KvikError,
    "There is no store daemon, or it was lost: go on without it."
);
create_exception!(kvik, RefusedError, KvikError, "The store daemon does not serve this client.");

pub(crate) fn add_to(module: &Bound<'_, PyModule>) -> PyResult<()> {
    let py = module.py();
    module.add("KvikError", py.get_type::<KvikError>())?;
    module.add("InvalidValueError", py.get_type::<InvalidValueError>())?;
    module.add("StoreGoneError", py.get_type::<StoreGoneError>())?;
    module.add("RefusedError", py.get_type::<RefusedError>())
}

/// The exception for an error of the store.
pub(crate) fn exception_of(error: &NodeError) -> PyErr {
    let message = error.with_causes();
    match error {
        NodeError::Invalid { .. } | NodeError::InvalidRemote { .. } | NodeError::Store(_) => {
            InvalidValueError::new_err(message)
        }
        NodeError::Gone { .. } | NodeError::Moving => StoreGoneError::new_err(message),
        NodeError::Refused { .. } => RefusedError::new_err(message),
        _ => KvikError::new_err(message),
    }
}

/// The exception for an error of the elastic memory.
pub(crate) fn memory_exception_of(error: &MemoryError) -> PyErr {
    let message = error.to_string();
    match error {
        MemoryError::Invalid { .. } | MemoryError::NotAllocated { .. } => InvalidValueError::new_err(message),
        _ => KvikError::new_err(message),
    }
}

/// The exception for a value that a type refuses.
pub(crate) fn invalid_type(error: &TypesError) -> PyErr {
    InvalidValueError::new_err(error.to_string())
}

/// The exception for an argument that is not allowed.
pub(crate) fn invalid(field: &str, value: &dyn std::fmt::Display, allowed: &str) -> PyErr {
    InvalidValueError::new_err(format!("`{field}` is {value}; allowed: {allowed}"))
}
