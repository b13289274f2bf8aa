//! Polls a device, which wgpu 30 may answer with a panic: where the driver's answer is an error, where a wait finds the device lost,
//! and where a wait's time runs out while another thread polls (its pull request 9958).

use super::faults::Faults;
use super::outcome::Fault;
use crate::error::Error;
use crate::loss::LossReason;
use crate::panics::caught;

/// Polls. A device at which that panics is lost.
///
/// # Errors
/// What wgpu says, or the panic.
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
