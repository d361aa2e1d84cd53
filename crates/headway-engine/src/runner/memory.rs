//! What memory this process has and may have, as the operating system tells it. Linux; elsewhere
//! unknown.

use std::fs;

/// Bytes that could be allocated now without swapping: the least of what the system has available, what
/// the process's control group leaves, and what its limit of address space leaves (`ulimit -v`). `None`
/// where the system doesn't say.
pub fn available_bytes() -> Option<u64> {
    let system = meminfo("MemAvailable:")?;
    let limits = [cgroup_left(), address_space_left()];
    Some(limits.into_iter().flatten().fold(system, u64::min))
}

fn address_space_left() -> Option<u64> {
    let most = address_space(&fs::read_to_string("/proc/self/limits").ok()?)?;
    let used = kib_field(&fs::read_to_string("/proc/self/status").ok()?, "VmSize:")?;
    Some(most.saturating_sub(used))
}

/// The soft limit of address space, in bytes; `None` where there is none.
fn address_space(limits: &str) -> Option<u64> {
    let line = limits.lines().find_map(|l| l.strip_prefix("Max address space"))?;
    line.split_whitespace().next()?.parse().ok()
}

/// The most memory that the process had resident so far, in bytes.
pub fn peak_rss_bytes() -> Option<u64> {
    kib_field(&fs::read_to_string("/proc/self/status").ok()?, "VmHWM:")
}

fn meminfo(field: &str) -> Option<u64> {
    kib_field(&fs::read_to_string("/proc/meminfo").ok()?, field)
}

fn kib_field(text: &str, field: &str) -> Option<u64> {
    let line = text.lines().find_map(|l| l.strip_prefix(field))?;
    line.split_whitespace().next()?.parse::<u64>().ok()?.checked_mul(1024)
}

/// What the control group's limit leaves (version 2, then 1).
fn cgroup_left() -> Option<u64> {
    let number = |path: &str| fs::read_to_string(path).ok()?.trim().parse::<u64>().ok();
    let (max, used) = match number("/sys/fs/cgroup/memory.max") {
        Some(max) => (max, number("/sys/fs/cgroup/memory.current")?),
        None => (
            number("/sys/fs/cgroup/memory/memory.limit_in_bytes")?,
            number("/sys/fs/cgroup/memory/memory.usage_in_bytes")?,
        ),
    };
    Some(max.saturating_sub(used))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fields_are_in_kib() {
        assert_eq!(kib_field("MemTotal: 5 kB\nMemAvailable:   7 kB\n", "MemAvailable:"), Some(7168));
        assert_eq!(kib_field("MemTotal: 5 kB", "MemAvailable:"), None);
    }

    #[test]
    fn the_limit_of_address_space_is_the_soft_one() {
        let limits = |soft: &str| {
            format!("Limit  Soft Limit  Hard Limit  Units\nMax address space  {soft}  unlimited  bytes\n")
        };
        assert_eq!(address_space(&limits("6144000000")), Some(6_144_000_000));
        assert_eq!(address_space(&limits("unlimited")), None);
    }

    #[test]
    #[cfg(target_os = "linux")]
    fn this_process_has_memory() {
        assert!(peak_rss_bytes().is_some_and(|b| b > 100_000));
        assert!(available_bytes().is_some_and(|b| b > 1_000_000));
    }
}
