// AMX, which the emulator does not have: its tile instructions raise #UD there, and are carried out here as
// Intel's manual describes them (volume 2, "Intel AMX instructions"). Included by helper.c.
//
// Instructions: ldtilecfg, sttilecfg, tilerelease, tilezero, tileloadd(t1), tilestored, tdpbf16ps.

struct tiles {
    uint8_t config[64]; // as ldtilecfg reads it; palette 0: none loaded
    uint8_t data[8][16][64];
    uint32_t permitted; // whether the system lets this program use tile data
    uint64_t executed, products;
};
struct tiles tiles;

static int rows(int t) { return tiles.config[48 + t]; }
static int colsb(int t) { return tiles.config[16 + 2 * t] | tiles.config[17 + 2 * t] << 8; }

// Denormals are zero, both as inputs and as results.
static float flush(float x) {
    uint32_t b;
    memcpy(&b, &x, 4);
    if ((b & 0x7f800000) == 0) b &= 0x80000000;
    memcpy(&x, &b, 4);
    return x;
}
static float bf16(const uint8_t *p) {
    uint32_t b = (uint32_t)(p[0] | p[1] << 8) << 16;
    float x;
    memcpy(&x, &b, 4);
    return flush(x);
}

static void tdpbf16ps(int c, int a, int b) {
    for (int m = 0; m < rows(c); m++) {
        float sums[32] = {0};
        int n_count = colsb(c) / 4;
        for (int k = 0; k < colsb(a) / 4; k++)
            for (int n = 0; n < n_count; n++)
                for (int i = 0; i < 2; i++)
                    sums[2 * n + i] = flush(__builtin_fmaf(bf16(&tiles.data[a][m][4 * k + 2 * i]),
                                                           bf16(&tiles.data[b][k][4 * n + 2 * i]), sums[2 * n + i]));
        for (int n = 0; n < n_count; n++) {
            float old;
            memcpy(&old, &tiles.data[c][m][4 * n], 4);
            float sum = flush(flush(old) + flush(sums[2 * n] + sums[2 * n + 1]));
            memcpy(&tiles.data[c][m][4 * n], &sum, 4);
        }
        memset(&tiles.data[c][m][4 * n_count], 0, 64 - 4 * n_count);
    }
    for (int m = rows(c); m < 16; m++) memset(tiles.data[c][m], 0, 64);
    tiles.products += (uint64_t)rows(c) * (colsb(c) / 4) * (colsb(a) / 2);
}

static int load_config(const uint8_t *from) {
    if (from[0] > 1) return -13;
    for (int i = 2; i < 16; i++) if (from[i]) return -13;
    for (int t = 0; t < 16; t++) {
        int cols = from[16 + 2 * t] | from[17 + 2 * t] << 8, r = from[48 + t];
        if (t >= 8 ? cols || r : cols > 64 || r > 16 || !cols != !r) return -13;
    }
    memcpy(tiles.config, from, 64);
    memset(tiles.data, 0, sizeof tiles.data);
    return 0;
}

static uint64_t reg(int r);
static int in_memory(uint64_t at, uint64_t n);
static uint8_t *host(uint64_t at);

// Bytes of an instruction that looks like one of these; 0 for others.
static int length_of(const uint8_t *i) {
    if (i[0] != 0xc4 || (i[1] & 0x1f) != 2 || (i[3] != 0x49 && i[3] != 0x4b && i[3] != 0x5c)) return 0;
    int mod = i[4] >> 6, m = i[4] & 7, displacement = mod == 1 ? 1 : mod == 2 ? 4 : 0;
    if (mod == 3) return 5;
    if (m == 4) return 6 + (mod == 0 && (i[5] & 7) == 5 ? 4 : displacement);
    return 5 + (mod == 0 && m == 5 ? 4 : displacement);
}

// Bytes of the instruction carried out; 0: not one of these; negative: the exception that it raises.
static int amx(const uint8_t *i) {
    if (i[0] != 0xc4 || (i[1] & 0x1f) != 2 || (i[2] & 0x84)) return 0;
    int pp = i[2] & 3, vvvv = ~(i[2] >> 3) & 15, op = i[3], mod = i[4] >> 6, r = i[4] >> 3 & 7, m = i[4] & 7;
    int x = i[1] & 0x40 ? 0 : 8, b = i[1] & 0x20 ? 0 : 8;
    if (op != 0x49 && op != 0x4b && op != 0x5c) return 0;
    int configured = tiles.config[0] == 1;
    if (op == 0x5c) {
        if (pp != 2 || mod != 3) return 0;
        int c = r, a = m, bt = vvvv;
        if (!configured || bt > 7 || c == a || c == bt || a == bt || colsb(a) % 4 || colsb(c) % 4 ||
            !rows(a) || !rows(bt) || !rows(c) || rows(c) != rows(a) || colsb(c) != colsb(bt) || colsb(a) / 4 != rows(bt))
            return -6;
        if (!tiles.permitted) return -7;
        tdpbf16ps(c, a, bt);
        return 5;
    }
    if (vvvv) return -6;
    if (op == 0x49 && mod == 3) {
        if (pp == 0 && i[4] == 0xc0) {
            memset(&tiles.config, 0, sizeof tiles.config);
            memset(tiles.data, 0, sizeof tiles.data);
            return 5;
        }
        if (pp != 3 || m) return 0;
        if (!configured || !rows(r)) return -6;
        if (!tiles.permitted) return -7;
        memset(tiles.data[r], 0, 1024);
        return 5;
    }
    // An address: base, index, displacement.
    int at = 5;
    uint64_t address = 0, stride = 0;
    if (m == 4) {
        uint8_t sib = i[at++];
        int base = (sib & 7) | b, index = (sib >> 3 & 7) | x;
        if (index != 4) stride = reg(index) << (sib >> 6);
        if ((base & 7) == 5 && mod == 0) {
            int32_t d;
            memcpy(&d, i + at, 4);
            address = (int64_t)d, at += 4;
        } else {
            address = reg(base);
        }
    } else if (op == 0x4b) {
        return -6;
    } else if (m == 5 && mod == 0) {
        int32_t d;
        memcpy(&d, i + at, 4);
        address = pc(cpu) + (int64_t)d, at += 4; // pc is the next instruction's
    } else {
        address = reg(m | b);
    }
    if (mod == 1) address += (int64_t)(int8_t)i[at], at += 1;
    if (mod == 2) {
        int32_t d;
        memcpy(&d, i + at, 4);
        address += (int64_t)d, at += 4;
    }
    if (op == 0x49) {
        address += stride;
        if (r || pp > 1) return 0;
        if (!in_memory(address, 64)) return -14;
        if (pp == 1) {
            memcpy(host(address), tiles.config, 64);
            return at;
        }
        int error = load_config(host(address));
        return error ? error : at;
    }
    if (pp == 0) return 0;
    if (!configured || !rows(r)) return -6;
    if (!tiles.permitted) return -7;
    for (int row = 0; row < rows(r); row++) {
        uint64_t line = address + stride * row;
        if (!in_memory(line, colsb(r))) return -14;
        if (pp == 2) memcpy(host(line), tiles.data[r][row], colsb(r));
    }
    if (pp != 2) {
        memset(tiles.data[r], 0, 1024);
        for (int row = 0; row < rows(r); row++) memcpy(tiles.data[r][row], host(address + stride * row), colsb(r));
    }
    return at;
}
