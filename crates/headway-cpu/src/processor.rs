//! The processor by name, for reports and for figures that are its own.

/// What the system calls the processor's model; the architecture where it doesn't say.
pub fn model() -> String {
    let info = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    name_in(&info).unwrap_or_else(|| std::env::consts::ARCH.to_owned())
}

/// The `model name` of `/proc/cpuinfo`; on AArch64, which has none, implementer and part.
fn name_in(info: &str) -> Option<String> {
    let field = |name: &str| {
        let mut lines = info.lines().filter_map(|l| l.split_once(':'));
        let (_, value) = lines.find(|(key, value)| key.trim() == name && !value.trim().is_empty())?;
        Some(value.split_whitespace().collect::<Vec<_>>().join(" "))
    };
    let by_part = || Some(format!("implementer {}, part {}", field("CPU implementer")?, field("CPU part")?));
    field("model name").or_else(by_part)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_processor_is_named_as_its_system_names_it() {
        let x86 = "processor\t: 0\nmodel name\t: Intel(R) Xeon(R)  Processor @ 2.0GHz\nflags\t: fpu\n";
        assert_eq!(name_in(x86).as_deref(), Some("Intel(R) Xeon(R) Processor @ 2.0GHz"));
        let arm = "processor : 0\nCPU implementer : 0x41\nCPU part : 0xd4f\n";
        assert_eq!(name_in(arm).as_deref(), Some("implementer 0x41, part 0xd4f"));
        assert_eq!((name_in(""), name_in("model name :\n")), (None, None));
        assert!(!model().is_empty());
    }
}
