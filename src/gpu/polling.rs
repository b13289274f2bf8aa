//! Polls a device. wgpu 30 may panic: if the driver returns an error, if a wait finds the device lost, or if a wait
//! times out while another thread polls (wgpu pull request 9958).

use super::faults::Faults;
use super::outcome::Fault;
use crate::error::Error;
use crate::loss::LossReason;
use crate::panics::caught;

/// Polls the device and marks it as lost if wgpu panics.
///
/// # Errors
/// wgpu's message, or the panic's.
pub(super) fn poll(device: &wgpu::Device, fault: &Fault, faults: &Faults, how: wgpu::PollType) -> Result<(), String> {
    let polled = caught("polling the device", || {
        faults.poll(device, fault)?;
        device.poll(how).map(drop).map_err(|e| e.to_string())
    });
    polled.unwrap_or_else(|panic: Error| {
        fault.lose(LossReason::Driver, panic.to_string());
        Err(panic.to_string())
    })
}
